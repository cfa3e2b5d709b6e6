"""`accel launch` starts real processes and sees them through."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from accel_launch.supervision.orphans import find_orphans

SHOW = """
import json, os, sys
print(json.dumps({"words": sys.argv[1:], "rank": os.environ.get("RANK"), "size": os.environ.get("WORLD_SIZE"),
                  "run": os.environ["ACCEL_RUN_ID"]}))
"""
SUM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
import sys; sys.stdout.write(f"sum {int(total)} of {dist.get_world_size()}\\n")
dist.destroy_process_group()
"""

REACH = """
import os, socket, torch.distributed as dist
dist.init_process_group("gloo")
def reached(address):
    with socket.socket() as client:
        return client.connect_ex((address, int(os.environ["MASTER_PORT"]))) == 0
import sys; sys.stdout.write(f"{reached('127.0.0.1')} {reached('127.0.0.2')}\\n")
dist.barrier()
"""


def test_one_process_gets_its_words(accel, script) -> None:
    """One process gets the words after the script, options too, and no ranks."""
    done = accel("launch", "--cpu", script(SHOW), "a", "--cpu", "-m", status=0)
    (record,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert (record["words"], record["rank"]) == (["a", "--cpu", "-m"], None)


def test_many_processes_work_together(accel, script, printed) -> None:
    """`--cpu --num-processes 4` really starts 4 gloo ranks that reduce together."""
    done = accel("launch", "--cpu", "--num-processes", "4", script(SUM), status=0)
    assert printed(done.stdout) == ["sum 10 of 4"] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="every address of 127.0.0.0/8 is this machine's on Linux")
def test_other_machines_do_not_reach_the_store_of_one(accel, script, printed) -> None:
    """The ranks of one machine meet in a store that listens on loopback, and not on the machine's other addresses."""
    done = accel("launch", "--cpu", "--num-processes", "2", script(REACH), status=0)
    assert printed(done.stdout) == ["True False"] * 2


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_hangup_does_not_end_what_nohup_started(accel, script, printed, ranks: str) -> None:
    """Where a hangup is ignored, as `nohup` sees to it, the run goes on after one; elsewhere it ends the run."""
    name = script(
        "import os, signal, time\ntime.sleep(0.5)\n"
        "if os.environ.get('RANK', '0') == '0':\n    os.kill(os.getppid(), signal.SIGHUP)\n"
        "time.sleep(1)\nos.write(1, b'done\\n')\n"  # at once: unbuffered lines of two ranks mix
    )
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler, status, words in (
            (signal.SIG_IGN, 0, ["done"] * int(ranks)),
            (signal.SIG_DFL, 128 + signal.SIGHUP, []),
        ):
            signal.signal(signal.SIGHUP, handler)  # which what is started inherits
            done = accel("launch", "--cpu", "--num-processes", ranks, name, forked=False)
            assert (done.returncode, printed(done.stdout)) == (status, words), done.stderr
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_one_traceback_is_shown(accel, script, ranks: str) -> None:
    """Where every rank raises, one traceback is shown, last and whole; one that was handled is shown too."""
    name = script(
        "import logging, os, pathlib, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "here = pathlib.Path(__file__).parent\n(here / f\"{os.environ.get('RANK', 0)}.here\").touch()\n"
        "while len(list(here.glob('*.here'))) < int(os.environ.get('WORLD_SIZE', 1)):\n    time.sleep(0.01)\n"
        "if 'handled' in sys.argv:\n"
        "    try:\n        raise KeyError('handled')\n    except KeyError:\n        logging.exception('caught')\n"
        "raise ValueError('boom')\n"
    )
    done = accel("launch", "--cpu", "--num-processes", ranks, name, status=1)
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    assert done.stderr.endswith("ValueError: boom\n")
    assert ("exit code 1, ValueError: boom" in done.stderr) == (ranks == "2")
    if ranks == "1":
        done = accel("launch", "--cpu", name, "handled")
        assert done.stderr.count("KeyError: 'handled'") == 1, done.stderr
        assert done.stderr.count("ValueError: boom") == 1
        assert done.stderr.endswith("ValueError: boom\n")


FAILURES = {
    "raises": ("raise ValueError('boom')", 1, "ValueError: boom", "exit code 1"),
    "exits": ("sys.exit(3)", 3, "Rank 1 failed first: exit code 3.", "exit code 3"),
    "killed": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        137,
        "Rank 1 failed first: killed by SIGKILL.",
        "killed by SIGKILL",
    ),
    "crashes": ("os.abort()", 134, "Rank 1 failed first: killed by SIGABRT.", "killed by SIGABRT"),
    "syntax": ("exec('(')", 1, "SyntaxError", "exit code 1"),
    "leaves_child": (
        "import subprocess; subprocess.Popen(['sleep', '3600']); os._exit(4)",
        4,
        "exit code 4",
        "exit code 4",
    ),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_failing_rank_ends_the_run(accel, script, tmp_path: Path, kind: str) -> None:
    """One rank's failure ends all ranks within 10 s, is shown last, and is recorded; no process is left."""
    deed, status, last, how = FAILURES[kind]
    # Rank 1 waits until rank 0 runs: on a busy machine rank 0 may start much later than rank 1 fails.
    name = script(
        "import os, pathlib, signal, sys, time\n"
        + ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if kind == "raises" else "")
        + "if os.environ['RANK'] == '0':\n"
        "    print(os.environ['ACCEL_RUN_ID'], flush=True)\n"
        "    pathlib.Path('running').touch()\n"
        "else:\n"
        "    while not os.path.exists('running'):\n"
        "        time.sleep(0.02)\n"
        "    pathlib.Path('failed').touch()\n"
        f"    {deed}\n"
        "time.sleep(3600)\n"
    )
    done = accel("launch", "--cpu", "--num-processes", "2", "--log-dir", "logs", name)
    assert time.time() - (tmp_path / "failed").stat().st_mtime < 10 + 5
    assert done.returncode == status, done.stderr
    assert last in done.stderr.splitlines()[-1]
    assert done.stderr.count("Traceback (most recent call last)") <= 1
    record = json.loads((tmp_path / "logs" / "failure.json").read_text())
    first = record["ranks"][1]
    assert (record["first"], first["how"], record["ranks"][0]["stopped_by_launcher"]) == (1, how, True)
    run = (tmp_path / "logs" / "rank0.stdout.log").read_text().split()[0]
    assert find_orphans(run) == []


def test_single_process_failure_keeps_its_status(accel, script) -> None:
    """A script that exits 3 gives the status 3; one that is killed gives 128 + 9."""
    assert accel("launch", "--cpu", script("import sys; sys.exit(3)")).returncode == 3
    done = accel("launch", "--cpu", script("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), status=137)
    assert "Rank 0 failed first: killed by SIGKILL." in done.stderr


def test_port_in_use_is_told(accel, script) -> None:
    """A port that was asked for and is taken is an error that names it."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = accel("launch", "--cpu", "--num-processes", "2", "--main-process-port", port, script(SUM))
    assert done.returncode == 1
    assert f"cannot connect on port {port}" in done.stderr


def test_env_shows_versions(accel, tmp_path: Path) -> None:
    """`accel env --json` gives versions a machine can read, and hides secrets."""
    (tmp_path / "c.yaml").write_text("num_processes: 2\n")
    done = accel("env", "--json", "--config-file", "c.yaml", more={"ACCEL_API_TOKEN": "hush"}, status=0)
    shown = json.loads(done.stdout)
    assert shown["facts"]["PyTorch version"]
    assert shown["environment"]["ACCEL_API_TOKEN"] == "(hidden)"
    assert shown["configuration"] == {"num_processes": 2}
    assert "hush" not in done.stdout


GATHERED_ALONE = """
import torch
from accel_core.accelerator import Accelerator
accelerator = Accelerator(cpu=True)
if accelerator.is_main_process:
    accelerator.gather(torch.ones(2))
"""


def test_a_gather_of_the_main_process_alone_is_named(accel, script) -> None:
    """The commonest mistake is one question with the line of the script."""
    done = accel("launch", "--cpu", "--num-processes", "2", script(GATHERED_ALONE), forked=False, status=1)
    question = "rank 1 ended without calling gather ("
    assert done.stderr.count(question) == 1, done.stderr
    shown = done.stderr[done.stderr.index("Traceback") :]
    assert "train.py:6 in <module>); is the call inside `if accelerator.is_main_process`?" in shown
    assert "pair.cc" not in done.stderr
