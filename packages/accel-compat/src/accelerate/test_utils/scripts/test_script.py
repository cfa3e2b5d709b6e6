"""What `accelerate test` launches: a check that processes start, gather, split data and train like one process."""

from accel_launch.selfcheck import main as main
from accelerate import _rebinding

_rebinding.write_through(__name__)

if __name__ == "__main__":
    main()
