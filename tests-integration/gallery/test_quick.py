"""Some scripts of the gallery at a tiny size, on two processes, so that each change of accel meets them."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from accel_core.process import world as worlds
from accel_testing import world
from accel_testing.world import run

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


def curve(place: Path) -> None:
    """Train the language model on the beginning of its text, and write down what it would draw."""
    sys.path.insert(0, str(GALLERY))
    script: Any = importlib.import_module("language_model")
    cut, order = script.windows, torch.Generator().manual_seed(1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(script, "EPOCHS", 1))
        stack.enter_context(patch.object(script, "windows", lambda text: cut(text[: 120 * (script.LENGTH + 1)])))
        loader = partial(torch.utils.data.DataLoader, generator=order)  # or the order depends on the processes
        stack.enter_context(patch.object(script, "DataLoader", loader))
        drawn = stack.enter_context(patch.object(script, "finish"))
        stack.enter_context(patch.object(sys, "argv", ["language_model", "--folder", str(place)]))
        script.main()
    accelerator, _, _, rows, curves = drawn.call_args.args
    if accelerator.is_main_process:
        found = [*curves["training loss"], float(rows["bits per character"].split()[0])]
        (place / "curve.json").write_text(json.dumps(found))
    accelerator.end_training()


@pytest.mark.full("a whole training")
def test_a_pipeline_has_the_curve_of_one_process(tmp_path: Path) -> None:
    """Two ranks that share the language model out have its losses, all along and on text that it has not seen."""
    cpu = {"ACCELERATE_USE_CPU": "true"}
    stages = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_PP_SIZE": "2"}
    found = []
    for ranks, environment in ((1, cpu), (2, cpu | stages)):
        place = tmp_path / str(ranks)
        place.mkdir()
        run(curve, ranks, (place,), quiet=60, environment=environment)
        found.append(json.loads((place / "curve.json").read_text()))
    one, piped = found
    assert len(one) == 3
    assert one[0] > one[-2], "it learns"
    assert piped == pytest.approx(one, abs=1e-4)
