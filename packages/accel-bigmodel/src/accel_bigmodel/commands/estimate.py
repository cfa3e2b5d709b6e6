"""`accel estimate-memory`: what memory a model needs, per dtype."""

from accel_bigmodel.arguments import add_arguments as add_arguments

name = "estimate-memory"
help = "Estimate how much memory a model needs to run and to train."
run = "accel_bigmodel.estimate:estimate_command"
