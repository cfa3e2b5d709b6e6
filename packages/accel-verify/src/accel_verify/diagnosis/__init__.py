"""What `accel doctor` examines: one file for each part of the machine, all without torch in this process."""
