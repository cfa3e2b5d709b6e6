"""Lets `python -m accel_launch` stand for `accel`."""

import sys

from accel_launch.cli import main

sys.exit(main())
