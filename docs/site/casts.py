"""Record the terminal casts of docs/casts/: real commands on a pseudo-terminal, drawn as they printed.

    nox -s casts                        # all of them
    nox -s casts -- failing hanging     # some

Nothing is typed in but the commands and the keys. Waits are shortened, and the folders of the machine that records are
given short names.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import termios
import time
from pathlib import Path
from typing import NamedTuple

import terminal

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "casts"
FOLDER = ROOT / "docs" / "casts"
DOWN, RETURN = "\x1b[B", "\r"
_THINKING = 0.8
"""Seconds between a question and the answer."""


class Cast(NamedTuple):
    """What is recorded.

    Attributes:
        title: What it shows, in a sentence.
        commands: Command lines, each with what is answered: the question that is waited for, and the keys.
    """

    title: str
    commands: dict[str, tuple[tuple[str, str], ...]]


CASTS = {
    "failing": Cast(
        "Two ranks train until one fails; accel launch ends the other and reports which failed first, and why.",
        {"tail -n 5 failing.py": (), "accel launch --cpu --num-processes 2 failing.py": ()},
    ),
    "hanging": Cast(
        "One of two ranks stops making progress; the watchdog ends the run and shows where each rank stands.",
        {"accel launch --cpu --num-processes 2 --watchdog 20 hanging.py": ()},
    ),
    "plan": Cast(
        "accel plan shows where the parts of a checkpoint go, before anything is loaded.",
        {"ls model": (), "accel plan model --max-memory 0=800KiB,cpu=600KiB --model net:Net": ()},
    ),
    "config": Cast(
        "accel config asks, and writes the configuration file.",
        {
            "accel config --config-file accel.yaml": (
                ("Where does the run take place?", RETURN),
                ("What does the run use?", DOWN + RETURN),
                ("Check operations", RETURN),
                ("torch.compile?", RETURN),
                ("Which engine", RETURN),
                ("How many processes", RETURN),
                ("mpirun", RETURN),
                ("Precision", DOWN + DOWN + RETURN),
                ("Write this file?", RETURN),
            ),
            "accel launch --explain --config-file accel.yaml train.py | head -8": (),
        },
    ),
    "doctor": Cast(
        "accel doctor examines a machine, and prints a remedy below each finding.",
        {"ACCEL_NUM_PROCESESS=2 accel doctor": ()},
    ),
    "meter": Cast(
        "A language model trains with a meter; accel launch shows how the run went.",
        {"accel launch --cpu --num-processes 2 examples/gallery/language_model.py": ()},
    ),
}
"""The casts, by name."""


def record(cast: Cast) -> terminal.Screen:
    """Run the commands of a cast in a folder with the scripts, and return the screen that showed them."""
    screen = terminal.Screen()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "run")
        shutil.copytree(SCRIPTS, folder, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run([sys.executable, "prepare.py"], cwd=folder, check=True)
        names, begun = _names(place), time.monotonic()
        for command, answers in cast.commands.items():
            screen.feed(f"\x1b[1;32m$\x1b[0m {command}\r\n", time.monotonic() - begun)
            _run(command, answers, folder, screen, begun, names)
    return screen


def _names(place: str) -> dict[str, str]:
    """Return short names for the folders of this machine, the longest first."""
    found = {str(folder): "site-packages" for folder in (ROOT / "packages").glob("*/src")}  # as if it were installed
    found |= {
        sysconfig.get_paths()["purelib"]: "site-packages", str(ROOT): "accel", f"{place}/run/": "", place: "/tmp/run",
        str(Path.home()): "~", str(Path(sys.prefix)): ".venv", os.uname().nodename: "laptop",
    }  # fmt: skip
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def _run(
    command: str,
    answers: tuple[tuple[str, str], ...],
    folder: Path,
    screen: terminal.Screen,
    begun: float,
    names: dict[str, str],
) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 60, terminal.COLUMNS, 0, 0))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TERM": "xterm", "HF_HOME": str(folder.parent / "home")}
    program = subprocess.Popen(
        command, shell=True, cwd=folder, env=environment, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    waiting, seen = list(answers), ""
    while True:
        if select.select([master], [], [], 0.05)[0]:
            try:
                said = os.read(master, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                break
            for long, short in names.items():
                said = said.replace(long, short)
            screen.feed(said, time.monotonic() - begun)
            seen += said
        elif waiting and waiting[0][0] in seen:
            time.sleep(_THINKING)
            seen = ""
            os.write(master, waiting.pop(0)[1].encode())
        elif program.poll() is not None:
            break
    os.close(master)
    if waiting:
        raise SystemExit(f"{command}: never asked {waiting[0][0]!r}; got\n{screen.text}")


def main() -> None:
    """Record the casts that are named, or all."""
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or CASTS:
        screen = record(CASTS[name])
        (FOLDER / f"{name}.svg").write_text(terminal.svg(screen, CASTS[name].title))
        sys.stdout.write(f"{name}\n{screen.text}\n\n")


if __name__ == "__main__":
    main()
