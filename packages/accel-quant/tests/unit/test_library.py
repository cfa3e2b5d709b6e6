"""Tests of where bitsandbytes is imported."""

import sys

import pytest

from accel_core.errors import MissingDependencyError
from accel_quant import BnbQuantizationConfig
from accel_quant.library import bitsandbytes


def test_packing_without_the_library_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration can be made without bitsandbytes; what needs it says how to get it."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    BnbQuantizationConfig(load_in_8bit=True)
    with pytest.raises(MissingDependencyError, match=r"pip install 'bitsandbytes>=0.47'"):
        bitsandbytes()
