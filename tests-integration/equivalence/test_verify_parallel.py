"""`accel verify-parallel` on an example: what the tutorial shows of it is what it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from accel_testing import world
from accel_verify.parallel.comparison import compare, tolerance_of
from accel_verify.parallel.layouts import requested_layout
from accel_verify.parallel.records import RecordedRun, read_run
from accel_verify.parallel.run import variables_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorials" / "verify-parallel.md"


def _record(folder: str, parts: int) -> None:
    """Record the example on a rank."""
    from accel_verify.parallel.recorder import main

    main([folder, "3", str(parts), "0", str(ROOT / "examples" / "train_digits.py"), "--folder", f"{folder}/run"])


def recorded(folder: Path, name: str | None) -> RecordedRun:
    """Run the example on a layout, or on one process that reads for two ranks."""
    folder.mkdir()
    layout = requested_layout(name) if name else None
    words = layout.words if layout else ("--num-processes", "1")
    ranks, parts = (layout.ranks, 0) if layout else (1, 2)
    world(ranks, environment=variables_of(("--cpu", *words), folder))(_record)(str(folder), parts)
    return read_run(folder)


def test_the_digits_are_equal_as_the_tutorial_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On copies and on shards; the page has the losses, the gradient norms and the note of this run."""
    one = recorded(tmp_path / "one", None)
    page = PAGE.read_text()
    for name in ("dp2", "fsdp2"):
        ranks = recorded(tmp_path / name, name)
        assert compare(one, ranks) == []
        assert f"{name} equals one process" in page
        shown = re.search(rf"^{name} .*\n.*\n.*", page, re.MULTILINE)
        assert shown is not None
        numbers = [[float(cell) for cell in line.split()[-3:]] for line in _without_memory(shown[0], name)]
        assert [row[0] for row in numbers] == pytest.approx([ranks.loss(step) for step in (1, 2, 3)], rel=1e-3)
        norms = [ranks.norm(step, "gradients") for step in (1, 2, 3)]
        assert [row[1] for row in numbers] == pytest.approx(norms, rel=1e-2)
        assert (ranks.note or "").startswith("AssertionError: the test accuracy is ")
    assert f"steps in {tolerance_of(one).format}; losses agree within {tolerance_of(one).loss:g}" in page
    assert not (tmp_path / "one" / "run" / "state").exists(), "nothing is saved"


def _without_memory(rows: str, name: str) -> list[str]:
    return [re.sub(r"\s+\d+ MiB$", "", row.removeprefix(name)) for row in rows.splitlines()]
