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


FAILING = """
import atexit, multiprocessing, sys, torch
from accel_core.checkpoint import folder, payload
from accel_core.checkpoint.run import BareRun
def full(*args, **kwargs):
    raise OSError(28, "No space left on device")
def main():
    payload.write_object = full
    return folder.save_state(BareRun([torch.nn.Linear(2, 2)]), sys.argv[1], blocking=False)
if __name__ == "__main__":
    notes = open(sys.argv[1] + ".txt", "w")
    notes.write("written")
    atexit.register(lambda: print("others ended", flush=True))
    {body}
"""

CHILD = """
    child = multiprocessing.get_context("fork").Process(target=main)
    child.start()
    child.join()
    notes.close()
    sys.exit(child.exitcode)
"""


def test_a_failure_that_nobody_asked_about_ends_the_process_with_a_report(tmp_path: Path) -> None:
    """Status 1 and the cause on standard error, at the end of a script, after sys.exit(0), and in a child process.

    Whatever others do at the end is done before, and what they wrote is in their files. Who asked is told once. (Where
    accel does not end the process the script closes its file: beside torch without NumPy, Python leaves it open.)
    """
    asked = "main()\n    try:\n        folder.background.finish()\n    except Exception: print('told')"
    asked += "\n    notes.close()"
    bodies = {"ends": "main()", "exits": "main(); sys.exit(0)", "child": CHILD.strip(), "asked": asked}
    for name, body in bodies.items():
        command = [sys.executable, "-c", FAILING.format(body=body), str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == (0 if name == "asked" else 1), done.stderr
        reported = done.stderr.count("No space left on device")
        assert (reported >= 1, "others ended" in done.stdout) == (name != "asked", True), done.stderr
        assert ("told" in done.stdout) == (name == "asked")
        assert (tmp_path / f"{name}.txt").read_text() == "written"
        assert not (tmp_path / name).exists()
