"""`accel config` on a real pseudo-terminal: arrow keys, return, and the file that results."""

import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from accel_testing import limits

DOWN, RETURN = b"\x1b[B", b"\r"


class Terminal:
    """A person at a terminal."""

    def __init__(self, words: list[str], folder: Path, variables: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        environment = {**variables, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "accel_launch", *words],
            cwd=folder,
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def wait_for(self, text: str) -> None:
        """Read until a text appears."""
        self._read_until(lambda: text in self.seen)
        assert text in self.seen, self.seen

    def press(self, keys: bytes, awaited: str = "") -> None:
        """Press keys, forget what was seen before, and read until a text appears."""
        self.seen = ""
        os.write(self._master, keys)
        self.wait_for(awaited)

    def end(self) -> int:
        """Wait for the program and return its status."""
        self._read_until(lambda: self._process.poll() is not None)
        status = self._process.wait(limits.limit())
        os.close(self._master)
        return status

    def _read_until(self, condition: Callable[[], bool]) -> None:
        deadline = limits.Deadline()
        while not condition():
            assert not deadline.is_over, self.seen
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self._master, 65536).decode(errors="replace")
                except OSError:
                    break


def test_config_on_a_terminal(tmp_path: Path, variables: dict[str, str]) -> None:
    """Arrow keys choose, `(back)` returns to the question before, and the file is written after it was shown."""
    terminal = Terminal(["config", "--config-file", "c.yaml"], tmp_path, variables)
    terminal.wait_for("Where does the run take place?")
    terminal.wait_for("SageMaker")
    assert "(back)" not in terminal.seen
    terminal.press(RETURN, "What does the run use?")
    terminal.wait_for("(hardware that is not here)")
    assert "XPU" not in terminal.seen
    terminal.press(DOWN + RETURN, "Check operations")
    terminal.press(DOWN + DOWN + RETURN, "What does the run use?")
    terminal.press(RETURN, "torch.compile?")
    terminal.press(RETURN, "Train on the CPU")
    terminal.press(DOWN + RETURN, "Precision")
    terminal.press(DOWN + DOWN + RETURN, "Write this file?")
    assert not (tmp_path / "c.yaml").exists()
    terminal.press(RETURN)
    assert terminal.end() == 0, terminal.seen
    text = (tmp_path / "c.yaml").read_text()
    assert "use_cpu: true" in text
    assert "mixed_precision: bf16" in text
    assert "distributed_type: 'NO'" in text


def test_interrupted_config_writes_nothing(tmp_path: Path, variables: dict[str, str]) -> None:
    """Ctrl-C in the dialogue ends with status 130 and no file."""
    terminal = Terminal(["config", "--config-file", "c.yaml"], tmp_path, variables)
    terminal.wait_for("Where does the run take place?")
    terminal.press(b"\x03")
    assert terminal.end() == 130, terminal.seen
    assert not (tmp_path / "c.yaml").exists()


def test_help_has_colors_on_a_terminal_only(tmp_path: Path, variables: dict[str, str], accel) -> None:
    """Help is colored on a terminal, plain elsewhere and under NO_COLOR."""
    terminal = Terminal(["launch", "--help"], tmp_path, variables)
    assert terminal.end() == 0
    assert "\x1b[36m--cpu" in terminal.seen
    plain = Terminal(["launch", "--help"], tmp_path, {**variables, "NO_COLOR": "1"})
    assert plain.end() == 0
    assert "--cpu" in plain.seen
    assert "\x1b[" not in plain.seen
    assert "\x1b[" not in accel("launch", "--help").stdout
