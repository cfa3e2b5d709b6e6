"""Some scripts of the gallery at a tiny size, on two processes, so that each change of accel meets them."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from accel_core.process import world as worlds
from accel_core.testing import world

GALLERY = Path(__file__).resolve().parents[2] / "examples" / "gallery"
TINY: dict[str, tuple[dict[str, int], str]] = {
    "image_classification": ({"EPOCHS": 1}, "test digits    360"),
    "mixture_of_experts": ({"EPOCHS": 1}, "16, of which each process holds 8"),
    "reinforcement_learning": ({"UPDATES": 2, "LONGEST": 20}, "games played       64"),
    "streaming": ({"STEPS": 6, "SAVED_AT": 4}, "the same weights  True, bit for bit"),
}
"""Scripts, each with sizes that are set in it, and a line that it prints."""


@pytest.mark.parametrize("name", TINY)
@world(2, environment={"ACCELERATE_USE_CPU": "true"})
def test_a_tiny_run_prints_its_result(name: str, tmp_path: Path) -> None:
    """The script ends well on both ranks, and one of them prints the result."""
    sizes, line = TINY[name]
    sys.path.insert(0, str(GALLERY))
    script: Any = importlib.import_module(name)
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        for size, value in sizes.items():
            stack.enter_context(patch.object(script, size, value))
        stack.enter_context(patch.object(importlib.import_module("report"), "find_spec", lambda name: None))  # no curve
        stack.enter_context(patch.object(sys, "argv", [name, "--folder", str(tmp_path)]))
        rank = worlds.ensure().rank
        stack.enter_context(contextlib.redirect_stdout(printed))
        script.main()
    assert (line in printed.getvalue()) is (rank == 0), printed.getvalue()
