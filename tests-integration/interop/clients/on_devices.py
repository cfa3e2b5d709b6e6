"""Runs another client on simulated accelerators, one for each rank: `python on_devices.py CLIENT`.

The device computes on the CPU but has a memory of its own: an operation on tensors of two devices is refused.
"""

import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "simulated_device"))

import simulated


def main() -> None:
    """Run the client on this rank's device."""
    simulated.set_up()
    simulated.make_known()
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{simulated.NAME}:{os.environ['LOCAL_RANK']}"
    runpy.run_path(str(Path(__file__).with_name(f"{sys.argv[1]}.py")), run_name="__main__")


if __name__ == "__main__":
    simulated.leave(main)
