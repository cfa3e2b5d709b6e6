"""Marks that skip a test where it cannot run, and say why."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest

from accel_core.host.versions import installed_version, is_torch_version
from accel_core.options.engines import absent


def missing(need: str) -> str | None:
    """Return why `need` is not met here, or `None` where it is."""
    kind, _, name = need.rpartition(":")
    if kind in ("", "library"):
        return None if importlib.util.find_spec(name) is not None else f"needs the library {name}, not installed here"
    if kind == "program":
        return None if shutil.which(name) else f"needs the program {name}, not on this machine"
    if kind == "device":
        import torch

        module = getattr(torch, name, None)
        return None if module is not None and module.is_available() else f"needs a {name} device, none on this machine"
    if kind == "torch":
        return None if is_torch_version(">=", name) else f"needs torch {name}; this is {installed_version('torch')}"
    if kind == "engine":
        return next((f"needs {known.package}, not installed here" for known in absent(name)), None)
    if kind == "user":
        return None if os.geteuid() == 0 else "needs root"
    raise ValueError(
        f"A requirement has an unknown kind {kind!r}. Use library, program, device, torch, engine or user."
    )


def requires(*needs: str) -> pytest.MarkDecorator:
    """Skip the test unless all `needs` are met, and give the first that is not as the reason."""
    reasons = [reason for reason in map(missing, needs) if reason]
    return pytest.mark.skipif(bool(reasons), reason=reasons[0] if reasons else "")
