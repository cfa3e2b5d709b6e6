"""The program that starts a module of accel's own in another process; alone in its folder, which Python puts first."""
