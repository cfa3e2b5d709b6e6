"""Errors about models, and whose they are."""

from accel_core.host.availability import is_timm_available, is_transformers_available
from accelerate._hub import check_has_model


def test_errors_of_libraries_are_told_apart() -> None:
    """An error counts as a library's where the library is installed and raises such errors."""
    timm = RuntimeError("Unknown model (nothing)")
    transformers = OSError("nothing does not appear to have a file named config.json")
    assert check_has_model(timm) == ("timm" if is_timm_available() else "unknown")
    assert check_has_model(transformers) == ("transformers" if is_transformers_available() else "unknown")
    assert check_has_model(ValueError("Unknown model")) == "unknown"
