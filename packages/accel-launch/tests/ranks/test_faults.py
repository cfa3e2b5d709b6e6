"""What goes wrong around a run: full disks, closed descriptors, impatient people, missing programs and folders."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_launch.supervision.orphans import alive
from accel_testing import limits

FULL = Path("/dev/full")
LAUNCH = [sys.executable, "-m", "accel_launch", "launch", "--cpu"]
CHATTY = """
import os, sys
for _ in range(64):
    sys.stdout.write("o" * 4096 + "\\n")
    sys.stderr.write("e" * 4096 + "\\n")
sys.stdout.flush()
open("done" + os.environ.get("RANK", "0"), "w").close()
"""


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("ranks", [1, 2])
def test_full_disk_of_the_logs_does_not_stop_the_run(accel, script, tmp_path: Path, ranks: int) -> None:
    """Logs that cannot be written are told once each; every rank goes on, and all it prints is still shown."""
    (tmp_path / "logs").mkdir()
    for rank in range(ranks):
        for stream in ("stdout", "stderr"):
            (tmp_path / "logs" / f"rank{rank}.{stream}.log").symlink_to(FULL)
    done = accel("launch", "--cpu", "--num-processes", str(ranks), "--log-dir", "logs", script(CHATTY), status=0)
    assert all((tmp_path / f"done{rank}").exists() for rank in range(ranks))
    assert done.stdout.count("o") == ranks * 64 * 4096
    assert done.stderr.count("No space left on device") == 2 * ranks
    assert "The run goes on" in done.stderr


DEAF = """
import os, signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
open("pid" + os.environ.get("RANK", "0"), "w").write(str(os.getpid()))
time.sleep(3600)
"""


@pytest.fixture
def deaf(tmp_path: Path, variables: dict[str, str]) -> Callable[[int], "subprocess.Popen[str]"]:
    """Start ranks that ignore signals, and wait until each is deaf."""

    def start(ranks: int) -> "subprocess.Popen[str]":
        (tmp_path / "deaf.py").write_text(DEAF)
        words = [*LAUNCH, "--num-processes", str(ranks), "deaf.py"]
        process = subprocess.Popen(words, cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True)
        files = [tmp_path / f"pid{rank}" for rank in range(ranks)]
        assert limits.wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        return process

    return start


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_ends_the_run_at_once(deaf, tmp_path: Path, ranks: int, number: signal.Signals) -> None:
    """The second Ctrl-C kills ranks that ignore the first; the status still names the first signal."""
    process = deaf(ranks)
    process.send_signal(number)
    time.sleep(0.5)
    assert all(alive(int((tmp_path / f"pid{rank}").read_text())) for rank in range(ranks))
    process.send_signal(number)
    _, errors = limits.communicate(process)
    assert process.returncode == 128 + number
    assert f"stopped by {number.name}" in errors
    assert not any(alive(int((tmp_path / f"pid{rank}").read_text())) for rank in range(ranks))


def without_warnings_of_torch(errors: str) -> list[str]:
    """Return the lines that are not torch's warning of a missing NumPy, which accel-launch does not need."""
    lines = errors.splitlines()
    warned = {number for number, line in enumerate(lines) if "Failed to initialize NumPy" in line}
    return [line for number, line in enumerate(lines) if not warned & {number, number - 1}]


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize(("folder", "why"), [("taken", "File exists"), ("n" * 300, "File name too long")])
def test_log_folder_that_cannot_be_made(accel, script, tmp_path: Path, folder: str, why: str, ranks: str) -> None:
    """A log folder that is a file, or whose name is too long, is refused in one line before anything starts."""
    (tmp_path / "taken").write_text("mine")
    done = accel(
        "launch", "--cpu", "--num-processes", ranks, "--log-dir", folder, script("open('ran', 'w').close()"), status=2
    )
    (line,) = without_warnings_of_torch(done.stderr)
    assert why in line
    assert "--log-dir" in line
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize(
    ("program", "why"),
    [("./missing", "No such file or directory"), ("./plain", "Permission denied"), ("./text", "Exec format error")],
)
def test_program_that_cannot_be_started(accel, tmp_path: Path, program: str, why: str, ranks: str) -> None:
    """A program that is missing, not executable or of no known format is named in one line."""
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    (tmp_path / "text").write_bytes(b"\x7fnothing that runs")
    (tmp_path / "text").chmod(0o755)
    done = accel("launch", "--cpu", "--num-processes", ranks, "--no-python", program, status=1)
    (line,) = without_warnings_of_torch(done.stderr)
    assert f"{program!r} gives: {why}" in line


def test_earlier_files_of_the_log_folder_are_kept_apart(accel, script, tmp_path: Path) -> None:
    """A run writes logs of its own; logs and record of the runs before stay under numbered names."""
    logs = tmp_path / "logs"
    name = script("import os, sys\nsys.exit(print('attempt ' + os.environ['ATTEMPT']) or int(os.environ['STATUS']))")
    for attempt, status in enumerate(("3", "4", "0")):
        more = {"ATTEMPT": str(attempt), "STATUS": status}
        assert accel("launch", "--cpu", "--log-dir", "logs", name, more=more).returncode == int(status)
    assert not (logs / "failure.json").exists()
    records = [json.loads((logs / f"failure.{number}.json").read_text()) for number in (1, 2)]
    assert [record["ranks"][0]["exit_code"] for record in records] == [3, 4]
    shown = [(logs / f"rank0.stdout{number}.log").read_text() for number in (".1", ".2", "")]
    assert shown == ["attempt 0\n", "attempt 1\n", "attempt 2\n"]


def test_logs_go_on_after_a_restart(accel, script, tmp_path: Path) -> None:
    """Attempts of one run share a log."""
    name = script(
        "import os, pathlib, sys, time\nattempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('attempt ' + attempt, flush=True)\npathlib.Path(f\"{attempt}-{os.environ['RANK']}\").touch()\n"
        "while not all(pathlib.Path(f'{attempt}-{rank}').exists() for rank in range(2)):\n    time.sleep(0.01)\n"
        "sys.exit(attempt == '0')\n"
    )
    accel("launch", "--cpu", "--num-processes", "2", "--max-restarts", "1", "--log-dir", "logs", name, status=0)
    assert (tmp_path / "logs" / "rank1.stdout.log").read_text() == "attempt 0\nattempt 1\n"
    names = [f"rank{rank}.{stream}.log" for rank in range(2) for stream in ("stderr", "stdout")]
    assert sorted(os.listdir(tmp_path / "logs")) == names


HUNGRY = """
import resource
import torch
from accel_core.accelerator import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024, bias=False))
optimizer = torch.optim.Adam(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.backward(model(torch.ones(2, 1024)).sum())
optimizer.step()
ema = accelerator.ema(model)

def remember(size):
    kept = []
    if accelerator.process_index == 1:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, resource.RLIM_INFINITY))
    while accelerator.process_index == 1:
        kept.append(torch.ones(size, size))
    accelerator.wait_for_everyone()

remember(4096)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="a process learns its size on Linux only")
def test_a_rank_without_memory_tells_what_held_it(accel, script, tmp_path: Path) -> None:
    """Below the traceback of a rank whose memory is full, weights, gradients, state and tensors stand with names."""
    options = ("--cpu", "--num-processes", "2", "--log-dir", "logs", "--all-frames")
    done = accel("launch", *options, script(HUNGRY), quiet=20, status=1)
    record = json.loads((tmp_path / "logs" / "failure.json").read_text())
    _, told = (rank["traceback"] for rank in record["ranks"])
    assert told in done.stderr
    above, _, below = told.partition("Memory ran out on rank 1. What held it:\n")
    assert "can't allocate memory" in above.splitlines()[-1]
    held = {line[2:18].strip(): line[18:].split() for line in below.splitlines()}
    assert list(held)[:5] == ["other tensors", "optimizer", "parameters", "gradients", "averages"]
    assert held["other tensors"][2:5] == ["kept", "in", "remember"]
    sizes = {kind: float(words[0]) for kind, words in held.items() if kind != "the process"}
    own = (2 * 1024 * 4096 + 4096) * 4 / 2**20
    assert sizes == pytest.approx(
        {"other tensors": 960, "optimizer": 2 * own, "parameters": own, "gradients": own, "averages": own}, abs=0.1
    )
    assert all(held[kind][2] == "0.weight" for kind in ("optimizer", "parameters", "gradients", "averages"))
