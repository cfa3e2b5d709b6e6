"""Adapters are recognised without importing the library they come from."""

import sys
from types import ModuleType

import pytest
from torch import nn

from accel_core.modules.adapters import is_peft_model


class _Wrapped(nn.Module):
    """Stands for the class of peft's models."""


def test_without_peft_nothing_is_a_peft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is no peft model where peft was never imported, and peft stays unimported."""
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    assert not is_peft_model(nn.Linear(1, 1))
    assert "peft" not in sys.modules


def test_a_peft_model_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance of peft's class is one, another module is not."""
    library = ModuleType("peft")
    library.PeftModel = _Wrapped  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "peft", library)
    assert is_peft_model(_Wrapped())
    assert not is_peft_model(nn.Linear(1, 1))
