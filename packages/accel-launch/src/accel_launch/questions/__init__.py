"""What `accel config` asks, and how."""
