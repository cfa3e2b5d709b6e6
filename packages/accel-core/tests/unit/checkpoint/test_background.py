"""The one save in flight, in processes that end by themselves."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_core.checkpoint import commit
from accel_testing import limits, requires

SCRIPT = """
import atexit, json, multiprocessing, os, sys, time, torch
from accel_core.checkpoint import background, pickles
from accel_core.checkpoint.save import save_state
from accel_core.checkpoint.run import BareRun
from accel_core.errors import CheckpointError
write = pickles.write_object
def slow(*args, **kwargs):
    time.sleep(0.3)
    return write(*args, **kwargs)
def full(*args, **kwargs):
    raise OSError(28, "No space left on device")
def save(target, how):
    pickles.write_object = how
    return save_state(BareRun([torch.nn.Linear(2, 2)]), target, blocking=False)
codes = {}
for target, body in json.loads(sys.argv[1]).items():
    child = os.fork()
    if child == 0:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{target}.{name}", os.O_WRONLY | os.O_CREAT), number)
        exec(body)
        break  # to the end of the script, as any other process
    codes[target] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
else:
    print(json.dumps(codes))
"""


def endings(folder: Path, bodies: dict[str, str]) -> dict[str, tuple[int, str, str]]:
    """Run each body in a process forked from one that imported torch; return its status and what it wrote."""
    given = json.dumps({str(folder / name): body for name, body in bodies.items()})
    done = limits.run([sys.executable, "-c", SCRIPT, given], quiet=12)
    assert done.returncode == 0, done.stderr
    codes: dict[str, Any] = json.loads(done.stdout)
    return {
        Path(target).name: (code, Path(f"{target}.out").read_text(), Path(f"{target}.err").read_text())
        for target, code in codes.items()
    }


SLOW = """
save(target, slow)
print("end of script", flush=True)
"""

FAILING = """
notes = open(target + ".txt", "w")
notes.write("written")
atexit.register(lambda: print("others ended", flush=True))
"""

CHILD = """
child = multiprocessing.get_context("fork").Process(target=save, args=(target, full))
child.start()
child.join()
notes.close()
sys.exit(child.exitcode)
"""

ASKED = """
save(target, full)
try:
    background.finish()
except CheckpointError as failure:
    print("told", failure)
notes.close()
"""

UPLOADING = """
from accel_core.checkpoint.remote.storage import RemoteStorage
write_ = RemoteStorage.write
def late(*args):
    time.sleep(0.5)
    return write_(*args)
RemoteStorage.write = late
save("memory://bucket/ckpt", write)
"""


@requires("fsspec")
@pytest.mark.slow
def test_a_save_to_a_store_goes_on_when_the_script_has_ended(tmp_path: Path) -> None:
    """It takes threads from pools, of which Python gives none once a script has ended."""
    assert endings(tmp_path, {"ends": UPLOADING}) == {"ends": (0, "", "")}


@pytest.mark.slow
def test_the_process_does_not_exit_before_the_save_is_done(tmp_path: Path) -> None:
    """A script that ends, or fails, right after the call leaves a complete checkpoint."""
    ended = endings(tmp_path, {"ends": SLOW, "fails": SLOW + "raise KeyError"})
    for name, code in (("ends", 0), ("fails", 1)):
        assert ended[name][:2] == (code, "end of script\n"), ended[name]
        assert commit.find(tmp_path / name) is not None


@pytest.mark.slow
def test_an_unread_failure_ends_the_process_with_a_report(tmp_path: Path) -> None:
    """Status 1 and the cause on standard error, at the end of a script, after sys.exit(0), and in a child process.

    Whatever others do at the end is done before, and what they wrote is in their files. Who asked is told why. (Where
    accel does not end the process the script closes its file: beside torch without NumPy, Python leaves it open.)
    """
    bodies = {"ends": "save(target, full)", "exits": "save(target, full)\nsys.exit(0)", "child": CHILD, "asked": ASKED}
    ended = endings(tmp_path, {name: FAILING + body for name, body in bodies.items()})
    for name, (code, output, errors) in ended.items():
        assert code == (0 if name == "asked" else 1), errors
        reported = errors.count("No space left on device")
        assert (reported >= 1, "others ended" in output) == (name != "asked", True), errors
        assert output.count("No space left on device") == (name == "asked")
        assert (tmp_path / f"{name}.txt").read_text() == "written"
        assert not (tmp_path / name).exists()
