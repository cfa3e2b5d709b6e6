"""The commands that come with accel-launch, one file each."""
