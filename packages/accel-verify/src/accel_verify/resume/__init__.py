"""Does a script continue exactly where it was interrupted? The command `accel check-resume`."""
