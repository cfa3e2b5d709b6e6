"""`accel try`: the first look at a training script, before it is launched for long."""
