"""Programs that tests fork instead of starting Python anew."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from accel_testing import limits
from accel_testing.programs import Program, ProgramAndRanks

TOLD = (
    "import multiprocessing, os, sys\n"
    "if __name__ == '__main__':\n"
    "    parent = multiprocessing.parent_process()\n"
    "    print(sys.argv[1:], os.getcwd(), os.environ.get('MINE'), parent, multiprocessing.current_process().daemon)\n"
    "    print(sys.stdin.read(), file=sys.stderr)\n"
)


@pytest.mark.parametrize(
    ("source", "status", "told"),
    [
        ("", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('words')", 1, "words\n"),
        ("raise KeyError('lost')", 1, "KeyError: 'lost'\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import atexit, sys; atexit.register(lambda: print('left', file=sys.stderr))", 0, "left\n"),
    ],
)
def test_a_program_ends_as_under_a_new_python(tmp_path: Path, source: str, status: int, told: str) -> None:
    """Its status, and what it says last, are those of a process that was started."""
    (tmp_path / "program.py").write_text(source)
    for started_by in (subprocess.Popen, Program):
        done = limits.run([sys.executable, "program.py"], cwd=tmp_path, started_by=started_by)
        assert (done.returncode, done.stdout) == (status, ""), done.stderr
        assert done.stderr.endswith(told)


def test_a_program_finds_what_a_new_python_finds(tmp_path: Path) -> None:
    """Arguments, folder, variables, its input, and that it is nobody's child are the same for both."""
    (tmp_path / "program.py").write_text(TOLD)
    given = {"cwd": tmp_path, "env": {"MINE": "1", "PATH": ""}, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    told = []
    for kind in (subprocess.Popen, Program):
        with kind([sys.executable, "program.py", "-a", "b"], text=True, stderr=subprocess.PIPE, **given) as process:
            told.append(process.communicate("typed", timeout=limits.limit()))
    assert told[0] == told[1]
    assert told[0] == (f"['-a', 'b'] {tmp_path} 1 None False\n", "typed\n")


def test_a_signal_reaches_the_program(tmp_path: Path) -> None:
    """Ctrl-C ends it as it ends any program that does not handle it."""
    # A background job ignores the signal, and what it starts inherits that.
    source = "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    (tmp_path / "program.py").write_text(f"{source}open('ready', 'w').close()\ntime.sleep(3600)\n")
    with Program([sys.executable, "program.py"], cwd=tmp_path, text=True, stderr=subprocess.PIPE) as process:
        assert limits.wait_until((tmp_path / "ready").exists)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = limits.communicate(process)
    assert process.returncode == -signal.SIGINT
    assert errors.endswith("KeyboardInterrupt\n")


OUTER = (
    "import atexit, os, signal, subprocess, sys, tempfile\n"
    "signal.signal(signal.SIGTERM, lambda *_: print('of the parent'))\n"
    "atexit.register(print, 'the parent ends', flush=True)\n"
    "with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, 'said'), 'w') as said:\n"
    "    words = [sys.executable, '-u', 'inner.py', folder]\n"
    "    given = {'stdin': subprocess.DEVNULL, 'stdout': said, 'start_new_session': True, 'env': {'MINE': '1'}}\n"
    "    child = subprocess.Popen(words, **given)\n"
    "    status = child.wait()\n"
    "    print(status, open(said.name).read(), os.listdir(folder))\n"
    "print(subprocess.run(['echo', 'any other'], capture_output=True, text=True).stdout)\n"
)
INNER = (
    "import multiprocessing, os, signal, sys\n"
    "def work(): print('of a worker', flush=True)\n"
    "if __name__ == '__main__':\n"
    "    worker = multiprocessing.get_context('fork').Process(target=work)\n"
    "    worker.start(); worker.join()\n"
    "    own = [os.getsid(0) == os.getpid(), signal.getsignal(signal.SIGTERM)]\n"
    "    print(own, os.environ['MINE'], 'PATH' in os.environ, [sys.stdin.read()])\n"
    "    os.kill(os.getpid(), signal.SIGTERM)\n"
)


def test_ranks_of_a_program_are_its_children(tmp_path: Path) -> None:
    """A child has its own session, signals, variables, streams and end; it ends nothing that is the parent's."""
    (tmp_path / "outer.py").write_text(OUTER)
    (tmp_path / "inner.py").write_text(INNER)
    told = []
    for kind in (subprocess.Popen, ProgramAndRanks):
        done = limits.run([sys.executable, "outer.py"], cwd=tmp_path, started_by=kind, check=True)
        assert done.stderr == ""
        told.append(done.stdout)
    assert told[0] == told[1]
    assert told[0].startswith("-15 of a worker\n[True, <Handlers.SIG_DFL: 0>] 1 False ['']")


LOOKS_UP = (
    "import os, pathlib, socket, subprocess, sys\n"
    "given = socket.getfqdn\n"
    "def look_up(*words):\n"
    "    if pathlib.Path('first').exists(): return given(*words)\n"
    "    pathlib.Path('first').touch(); os._exit(0)\n"
    "socket.getfqdn = look_up\n"
    "print(subprocess.run([sys.executable, 'inner.py']))\n"
)


def test_a_child_that_cannot_look_up_names_is_forked_anew(tmp_path: Path) -> None:
    """A child that gets no answer, here because it ends, is not the one that runs the program."""
    (tmp_path / "outer.py").write_text(LOOKS_UP)
    (tmp_path / "inner.py").write_text("print('inner', flush=True)\n")
    done = limits.run([sys.executable, "outer.py"], cwd=tmp_path, started_by=ProgramAndRanks, check=True)
    assert done.stdout.splitlines()[0] == "inner"
    assert "returncode=0" in done.stdout


def test_a_program_that_hangs_shows_where_its_ranks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its stacks and its children's are among what it printed."""
    (tmp_path / "outer.py").write_text("import subprocess, sys\nsubprocess.run([sys.executable, 'inner.py'])\n")
    (tmp_path / "inner.py").write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.setattr(limits, "_SHORTEST", 3.0)
    with pytest.raises(subprocess.TimeoutExpired):
        limits.run([sys.executable, "outer.py"], cwd=tmp_path, quiet=0.3, started_by=ProgramAndRanks)
    printed = capsys.readouterr().err
    assert 'inner.py", line 2 in <module>' in printed
    assert 'outer.py", line 2 in <module>' in printed
