"""Does a script go on exactly where it was interrupted? The command `accel check-resume`."""
