"""Whatever happens to a run, every process is told, nobody is left behind, and a person learns what happened."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accel_launch.supervision.orphans import find_orphans
from accel_testing import limits, requires
from accel_testing.programs import Program

SLEEPER = """
import os, signal, sys, time
rank = os.environ.get("RANK", "0")
def told(number, frame):
    open(f"told{rank}", "w").write(signal.Signals(number).name)
    sys.exit(0)
signal.signal(signal.SIGTERM, told)
signal.signal(signal.SIGINT, told)
time.sleep(0.5)  # the launcher may not know yet that this rank is there
open(f"ready{rank}", "w").write(os.environ["ACCEL_RUN_ID"])
time.sleep(3600)
"""

DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def launcher_listens():
    caught = next(line for line in open(f"/proc/{os.getppid()}/status") if line.startswith("SigCgt"))
    return int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1
while not launcher_listens():
    time.sleep(0.01)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(3600)
open("lived", "w").close()
"""


@pytest.fixture
def started(tmp_path: Path, variables: dict[str, str]) -> Callable[..., "subprocess.Popen[str]"]:
    """Start `accel launch` with a sleeping script, and wait until every rank is ready."""
    (tmp_path / "sleep.py").write_text(SLEEPER)

    def start(ranks: int) -> "subprocess.Popen[str]":
        words = [sys.executable, "-m", "accel_launch", "launch", "--cpu", "--num-processes", str(ranks), "sleep.py"]
        process = Program(words, cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True)
        files = [tmp_path / f"ready{rank}" for rank in range(ranks)]
        limits.wait_until(lambda: process.poll() is not None or all(map(_is_written, files)))
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert all(map(_is_written, files))
        return process

    return start


def _is_written(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


def wait_until_gone(run_id: str) -> list[int]:
    """Return the processes of a run that are left after a while."""
    limits.wait_until(lambda: not find_orphans(run_id), pause=0.1)
    return find_orphans(run_id)


@pytest.mark.parametrize(
    ("ranks", "number"), [(1, signal.SIGTERM), (1, signal.SIGINT), (2, signal.SIGTERM), (2, signal.SIGINT)]
)
def test_signals_reach_every_process(started, tmp_path: Path, ranks: int, number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM reach every rank, which may end in its own way; the status is 128 + N."""
    process = started(ranks)
    run = (tmp_path / "ready0").read_text()
    process.send_signal(number)
    _, errors = limits.communicate(process)
    assert process.returncode == 128 + number
    assert [(tmp_path / f"told{rank}").read_text() for rank in range(ranks)] == [number.name] * ranks
    assert f"stopped by {number.name}" in errors
    assert wait_until_gone(run) == []


def test_deaf_process_is_killed_when_its_time_is_over(tmp_path: Path, variables: dict[str, str]) -> None:
    """A command that ignores the signal to the launcher is killed when the time that it has to end is over."""
    (tmp_path / "deaf.py").write_text(DEAF)
    launcher = (
        "import os, sys; from accel_launch.supervision import run, supervisor; supervisor.TERMINATION_GRACE_S = 0.2; "
        "settings = dict(log_dir=None, tee='0', role='', watchdog=0, quiet=False); "
        "sys.exit(run.supervise([sys.executable, 'deaf.py'], os.environ, settings, one_rank=True))"
    )
    done = limits.run([sys.executable, "-c", launcher], cwd=tmp_path, env=variables)
    assert done.returncode == 128 + signal.SIGTERM
    assert "stopped by the launcher" in done.stderr
    assert not (tmp_path / "lived").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_launcher_leaves_nobody(started, tmp_path: Path, ranks: int) -> None:
    """Even SIGKILL of the launcher ends every rank."""
    process = started(ranks)
    run = (tmp_path / "ready0").read_text()
    process.kill()
    limits.communicate(process)
    assert wait_until_gone(run) == []


IN_A_THREAD = """
import signal, sys, threading
from accel_launch import cli
statuses = []
words = ["launch", "--cpu", "--num-processes", sys.argv[1], "train.py"]
before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
thread = threading.Thread(target=lambda: statuses.append(cli.main(words)))
thread.start()
thread.join()
assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
sys.exit(statuses[0])
"""


@pytest.mark.parametrize("status", [0, 7])
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_launch_may_run_in_a_thread(
    script, tmp_path: Path, variables: dict[str, str], ranks: str, status: int
) -> None:
    """A program that launches from a thread, which may handle no signals, has its run seen through as any other."""
    script(f"import os, sys\nsys.stdout.write(os.environ['ACCEL_RUN_ID'] + '\\n')\nsys.exit({status})\n")
    done = limits.run([sys.executable, "-c", IN_A_THREAD, ranks], cwd=tmp_path, env=variables)
    assert done.returncode == status, done.stderr
    assert find_orphans(done.stdout.split()[0]) == []


LAUNCHES = """
import subprocess, sys
subprocess.run([sys.executable, "-m", "accel_launch", "launch", "--cpu", "inner.py"])
"""

DEAF_WITH_A_CHILD = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "60"], start_new_session=True)  # a signal that is ignored stays so in a child
open("inner", "w").write(os.environ["ACCEL_RUN_ID"])
time.sleep(3600)
"""


def test_a_launch_inside_of_a_killed_one_ends_too(tmp_path: Path, variables: dict[str, str]) -> None:
    """Nothing outlives a launcher that is killed, nor what its script launched, deaf to SIGTERM or not."""
    (tmp_path / "outer.py").write_text(LAUNCHES)
    (tmp_path / "inner.py").write_text(DEAF_WITH_A_CHILD)
    words = [sys.executable, "-m", "accel_launch", "launch", "--cpu", "outer.py"]
    with subprocess.Popen(words, cwd=tmp_path, env=variables, stderr=subprocess.DEVNULL) as process:
        assert limits.wait_until(lambda: _is_written(tmp_path / "inner"))
        process.kill()
    run = (tmp_path / "inner").read_text().split()[-1]
    left = wait_until_gone(run)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


STUCK = """
import os, pathlib, time
folder = pathlib.Path(__file__).parent
(folder / f"begun-{os.environ.get('RANK', 0)}").touch()
while len(list(folder.glob("begun-*"))) < int(os.environ.get("WORLD_SIZE", 1)):
    print("waiting", flush=True)
    time.sleep(0.1)
def stuck_here():
    time.sleep(3600)
stuck_here()
"""


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_watchdog_shows_stacks_and_ends_the_run(accel, script, ranks: str) -> None:
    """Without progress for so long, the stacks of all ranks are printed and the run ends."""
    name = script(STUCK)
    done = accel("launch", "--cpu", "--num-processes", ranks, "--watchdog", "1.5", name, forked=False, status=134)
    assert done.stderr.count("in stuck_here") == int(ranks)
    assert all(f"Stacks of rank {rank}:\n" in done.stderr for rank in range(int(ranks)))
    assert "Fatal Python error" not in done.stderr
    assert "no rank made progress" in done.stderr


STOPPED = """
    if os.environ["RANK"] == "1":
        subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)
"""


def test_a_rank_late_to_the_watchdog_prints_its_stacks(accel, script) -> None:
    """The first rank that ends does not make torch end the others before they have printed."""
    name = script("import signal, subprocess" + STUCK.replace("    time.sleep(3600)\n", STOPPED.lstrip("\n")))
    done = accel("launch", "--cpu", "--num-processes", "2", "--watchdog", "1.5", name, forked=False, status=134)
    assert done.stderr.count("in stuck_here") == 2


SILENT_THEN_STUCK = """
import os, sys, threading, time
noisy = threading.Event()
noisy.set()
def chatter():
    while True:
        if noisy.is_set():
            print("still here", flush=True)
        time.sleep(0.1)
threading.Thread(target=chatter, daemon=True).start()
import torch
from accel_core.accelerator import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(1, 1)
data = torch.utils.data.DataLoader(torch.ones(1000, 1))
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
def stuck_here():
    open("trained", "w").close()
    noisy.set()
    time.sleep(3600)
end = None
for batch in loader:
    accelerator.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
    if end is None:
        noisy.clear()
        end = time.monotonic() + float(sys.argv[1])
    time.sleep(0.02)
    if time.monotonic() > end:
        stuck_here()
"""


def test_watchdog_goes_by_the_training_loop(accel, script, tmp_path: Path) -> None:
    """A loop that trains for long without output goes on; once it hangs it is ended, though a thread prints on."""
    seconds = 1.5 * limits.slowness()
    done = accel(
        "launch", "--cpu", "--watchdog", str(seconds), script(SILENT_THEN_STUCK), str(seconds + 0.8), forked=False
    )
    assert (tmp_path / "trained").exists(), done.stderr
    assert done.returncode == 134
    assert "in stuck_here" in done.stderr
    assert re.search(r"rank 0  printed \d+\.\d s ago, batch or optimizer step \d+ was \d", done.stderr)


def test_log_dir_keeps_what_every_rank_printed(accel, script, tmp_path: Path) -> None:
    """--log-dir keeps both streams of each rank, and they are still shown; --tee marks lines."""
    name = script(
        "import os, sys\nsys.stdout.write('out ' + os.environ['RANK'] + '\\n')\n"
        "sys.stderr.write('err ' + os.environ['RANK'] + '\\n')\n"
    )
    done = accel(
        "launch", "--cpu", "--num-processes", "2", "--log-dir", "logs", "--tee", "1", "--role", "r", name, status=0
    )
    assert sorted(done.stdout.splitlines()) == ["[r0]: out 0", "[r1]: out 1"]
    for rank in range(2):
        assert (tmp_path / "logs" / f"rank{rank}.stdout.log").read_text() == f"out {rank}\n"
        assert (tmp_path / "logs" / f"rank{rank}.stderr.log").read_text() == f"err {rank}\n"
    assert not (tmp_path / "logs" / "failure.json").exists()


def test_log_dir_may_be_in_the_home(accel, script, tmp_path: Path) -> None:
    """`~`, which a shell leaves alone in `--log-dir=~/logs`, is the home folder."""
    accel("launch", "--cpu", "--log-dir=~/logs", script("print(1)\n"), more={"HOME": str(tmp_path / "me")}, status=0)
    assert (tmp_path / "me" / "logs" / "rank0.stdout.log").read_text() == "1\n"


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_children_that_outlive_their_rank_are_ended(accel, script, ranks: str) -> None:
    """A process that a rank leaves behind is ended after a success too, and that is said."""
    name = script(
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '3600'], start_new_session=True, stdout=subprocess.DEVNULL,"
        " stderr=subprocess.DEVNULL)\nchild.returncode = 0\nsys.stdout.write(os.environ['ACCEL_RUN_ID'] + '\\n')\n"
    )
    done = accel("launch", "--cpu", "--num-processes", ranks, name, status=0)
    assert "outlived their ranks" in done.stderr
    assert find_orphans(done.stdout.split()[0]) == []


def test_restart_goes_on_after_a_failure(accel, script, tmp_path: Path) -> None:
    """--max-restarts starts all ranks again; a run that succeeds in the end is a success."""
    name = script(
        "import os, sys\nattempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "open(f\"attempt{attempt}.{os.environ['RANK']}\", 'w').close()\n"
        "sys.exit(7 if attempt == '0' and os.environ['RANK'] == '1' else 0)\n"
    )
    accel("launch", "--cpu", "--num-processes", "2", "--max-restarts", "1", name, status=0)
    assert (tmp_path / "attempt1.0").exists()
    assert (tmp_path / "attempt1.1").exists()


RESUMES = Path(__file__).with_name("resuming.py")


@pytest.mark.parametrize("kind", ["copies", pytest.param("pipeline", marks=requires("accel_parallel", "torch:2.13"))])
def test_killed_rank_costs_nothing(accel, tmp_path: Path, kind: str) -> None:
    """A rank is killed in mid-training; started again, the script ends with the weights of a run without that."""
    words = ("launch", "--cpu", "--num-processes", "2", "--max-restarts", "1", str(RESUMES), str(tmp_path), "17")
    # Ranks read the card's variable where accel is imported.
    done = accel(*words, *([kind] if kind == "pipeline" else []), forked=kind == "pipeline", status=0)
    one, two = (torch.load(tmp_path / name / "end.pt", weights_only=True) for name in ("straight", "killed"))
    assert (tmp_path / "killed" / "attempts").read_text() == "0 at 0\n1 at 15\n"
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    if kind == "pipeline":
        return
    assert (tmp_path / "straight" / "attempts").read_text() == "1 at 0\n"
    card = [line.split()[0] for line in done.stderr.splitlines()[-5:]]
    assert card == ["accel", "speed", "memory", "checkpoint", "resume"], done.stderr
    assert "% of the time waiting for data\n" in done.stderr
    assert f"checkpoint  {tmp_path}/killed/checkpoints/checkpoint_3\n" in done.stderr
    assert f"resume      accel launch --cpu --num-processes 2 --max-restarts 1 {RESUMES} {tmp_path} 17" in done.stderr


def test_eight_launches_at_once_all_succeed(tmp_path: Path, variables: dict[str, str]) -> None:
    """Eight launches on one machine never meet on one port."""
    (tmp_path / "port.py").write_text(
        "import os, sys\nsys.stdout.write(os.environ['MASTER_PORT'] + '\\n')\nimport time\ntime.sleep(1)\n"
    )
    words = [sys.executable, "-m", "accel_launch", "launch", "--cpu", "--num-processes", "2", "port.py"]
    running = [
        Program(words, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    ports = set()
    for process in running:
        out, errors = limits.communicate(process, quiet=12)
        assert process.returncode == 0, errors
        ports.update(out.split())
    assert len(ports) == 8


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--main-process-ip", "nohost.invalid", "--main-process-port", "1"], "address of machine 0 is unknown"),
        (
            ["--main-process-ip", "127.0.0.1", "--main-process-port", "9", "--rdzv-conf", "timeout=1"],
            "cannot be reached at",
        ),
    ],
)
def test_machine_that_cannot_be_reached_is_told(accel, script, words: list[str], told: str) -> None:
    """An unknown name and a silent port are told in seconds, not after torch's timeout."""
    line = ["launch", "--cpu", "--num-processes", "2", "--num-machines", "2", "--machine-rank", "1", *words, script("")]
    done = accel(*line, status=1)
    assert told in done.stderr


def test_check_command_checks(accel) -> None:
    """`accel test` really starts ranks that gather, split and train."""
    done = accel("test", status=0)
    assert done.stdout.count("holds for 2 processes") == 3


@requires("engine:fsdp")
def test_the_check_holds_for_a_model_in_shards(tmp_path: Path, accel) -> None:
    """Weights of which each rank holds a part are compared as a whole, within bf16."""
    (tmp_path / "shards.yaml").write_text(
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 2\nuse_cpu: true\n"
        "mixed_precision: bf16\n"
    )
    done = accel("test", "--config_file", "shards.yaml", status=0)
    assert "training is alike: holds for 2 processes on cpu" in done.stdout


@pytest.mark.parametrize("name", ["not_python.txt", "missing_module"])
def test_script_that_is_no_python(accel, script, name: str) -> None:
    """Text that is no Python, and a module that does not exist, fail with Python's own message."""
    if name == "missing_module":
        done = accel("launch", "--cpu", "-m", name)
        assert "No module named missing_module" in done.stderr
    else:
        done = accel("launch", "--cpu", script("this: is not (python", name))
        assert "SyntaxError" in done.stderr
    assert done.returncode == 1


def test_record_can_be_read_by_a_machine(accel, script, tmp_path: Path) -> None:
    """The failure's record is JSON with schema, host, command and how each rank ended."""
    done = accel("launch", "--cpu", "--log-dir", "logs", "--quiet", script("raise KeyError('lost')"), status=1)
    assert "accel launch:" not in done.stderr
    record = json.loads((tmp_path / "logs" / "failure.json").read_text())
    assert (record["schema"], record["first"], record["reason"]) == (1, 0, "failure")
    assert record["ranks"][0]["traceback"].endswith("KeyError: 'lost'")
    assert record["command"][-1] == "train.py"
    assert os.path.isabs(record["command"][0])


LEAVES = """\
for step in range(9):
    if accelerator.is_main_process and step == 3:
        break
    accelerator.backward(model(torch.ones(2, 4)).sum())
"""


@pytest.mark.full("a whole training")
@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (
            LEAVES,
            "Rank 0 ended (exit 0) while rank 1 was in backward at train.py:8; did it leave the loop early?",
        ),
        ("model.generate()\n", "call `accelerator.unwrap_model(model).generate`."),
    ],
)
def test_failure_of_a_rank_comes_with_its_reason(accel, script, lines: str, told: str) -> None:
    """A rank that left the loop is named and not the one that waited for it; frames of libraries are one line."""
    head = "import torch\nfrom accel_core.accelerator import Accelerator\naccelerator = Accelerator(cpu=True)\n"
    path = script(f"{head}model = accelerator.prepare(torch.nn.Linear(4, 4))\n{lines}")
    done = accel("launch", "--cpu", "--num-processes", "2", path, forked=False, status=1)
    assert told in done.stderr
    assert re.search(r"^\[rank\d\]:   … \d+ frames? in (accel_core, )?torch$", done.stderr, re.MULTILINE), done.stderr
    assert "failed first" not in done.stderr or "early" not in told
    whole = accel("launch", "--cpu", "--num-processes", "2", "--all-frames", path, forked=False)
    assert "…" not in whole.stderr
