"""The one save in flight, in processes of their own."""

import subprocess
import sys
from pathlib import Path

from accel_core.checkpoint.manifest import is_complete

SCRIPT = """
import sys, time, torch
from accel_core.checkpoint import folder, payload
from accel_core.checkpoint.run import BareRun
write = payload.write_object
def slow(*args, **kwargs):
    time.sleep(0.3)
    return write(*args, **kwargs)
payload.write_object = slow
folder.save_state(BareRun([torch.nn.Linear(2, 2)]), sys.argv[1], blocking=False)
print("end of script", flush=True)
{ending}
"""


def test_the_process_does_not_exit_before_the_save_is_done(tmp_path: Path) -> None:
    """A script that ends, or fails, right after the call leaves a complete checkpoint."""
    for ending, code in (("", 0), ("raise KeyError", 1)):
        target = tmp_path / f"ckpt{code}"
        command = [sys.executable, "-c", SCRIPT.format(ending=ending), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stdout) == (code, "end of script\n"), done.stderr
        assert is_complete(target)
