"""`python -m accel_launch` runs `accel`."""

import sys

from accel_launch.cli import main

sys.exit(main())
