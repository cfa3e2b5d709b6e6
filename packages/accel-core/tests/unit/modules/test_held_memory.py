"""What held memory is told below an error that says that memory ran out, and below no other one."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from accel_core.modules.held_memory import report_oom

ROWS = 1000


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Hide what earlier tests of this process left: models of theirs may share our names, or be larger."""
    gc.freeze()
    yield
    gc.unfreeze()


def told(error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is printed where an error that nobody catches ends the process."""
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    report_oom.__wrapped__(torch.device("cpu"), 3)
    try:
        raise error
    except BaseException as raised:
        sys.excepthook(type(raised), raised, raised.__traceback__)
    return capsys.readouterr().err


def test_holders_have_their_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Tied weights count once, views with what they are views of, and what has no name by its shape."""
    model = nn.Sequential(nn.Linear(ROWS, ROWS, bias=False), nn.Linear(ROWS, ROWS, bias=False), nn.BatchNorm1d(ROWS))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.rand(2, ROWS)).sum().backward()
    optimizer.step()

    class Hidden:
        values = torch.ones(3, ROWS, ROWS)

    text = told(MemoryError("full"), monkeypatch, capsys)
    assert text.startswith("Memory ran out on rank 3. What held it:\n")
    size = ROWS * ROWS * torch.float32.itemsize / 2**20
    for kind in ("parameters", "gradients", "optimizer"):
        assert re.search(rf"^  {kind} .* 0\.weight {size:.2f} MiB", text, re.MULTILINE), text
    assert re.search(r"^  buffers .* 2\.running_mean ", text, re.MULTILINE), text
    assert f"float32 of shape {tuple(Hidden.values.shape)} {3 * size:.2f} MiB" in text
    kinds = [line.split()[0] for line in text.splitlines()[1:-1]]
    assert kinds.index("other") < kinds.index("parameters")
    assert text.splitlines()[-1].startswith("  the process")


def test_models_of_equal_names_are_added(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two models of one kind are told under one name, with the sum of their sizes."""
    models = [nn.Sequential(nn.Linear(ROWS, ROWS, bias=False)) for _ in range(2)]
    size = len(models) * ROWS * ROWS * torch.float32.itemsize / 2**20
    assert f"0.weight {size:.2f} MiB\n" in told(MemoryError("full"), monkeypatch, capsys)


def test_other_errors_are_as_they_were(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is told below another error; below one that followed from full memory it is."""
    assert told(ValueError("a cuda kernel"), monkeypatch, capsys) == ""
    later = RuntimeError("the step failed")
    later.__cause__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert "What held it" in told(later, monkeypatch, capsys)
