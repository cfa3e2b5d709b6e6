"""Does a script train on a layout of ranks as on one process? The command `accel verify-parallel`."""
