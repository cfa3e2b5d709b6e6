"""What the recorder shows of a script that fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accel_verify.recorder import run_target


def test_a_traceback_begins_at_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The frames that run the script are not shown: as if Python had run it."""
    script = tmp_path / "raises.py"
    script.write_text("raise ValueError('of the script')\n")
    for name, value in (("argv", []), ("path", [*sys.path]), ("excepthook", sys.__excepthook__)):
        monkeypatch.setattr(sys, name, value)
    with pytest.raises(ValueError, match="of the script") as caught:
        run_target(str(script), [])
    sys.excepthook(ValueError, caught.value, caught.value.__traceback__)
    printed = capsys.readouterr().err
    assert printed.splitlines()[1].startswith(f'  File "{script}", line 1')
    assert "runpy" not in printed
