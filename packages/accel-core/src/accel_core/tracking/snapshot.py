"""Copies of logged values, taken when they are logged: what a training step changes later is not logged."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

__all__ = ["keep_file", "snapshot"]

_DEEPEST = 20


def snapshot(value: Any, depth: int = 0) -> Any:
    """Copy what may change: tensors, arrays and the containers that hold them.

    Args:
        value: Anything.
        depth: How deep in containers the value is.

    Returns:
        The same structure. Tensors stay on their device, so a GPU is not waited for; other objects are not copied.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if depth < _DEEPEST:
        if kind is dict:
            return {key: snapshot(item, depth + 1) for key, item in value.items()}
        if kind in (list, tuple):
            return kind(snapshot(item, depth + 1) for item in value)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return value.copy()
    return value


def keep_file(path: str, folder: Path) -> str:
    """Copy a file or folder to below `folder`, under the same name, so that its owner may remove it.

    Raises:
        OSError: It does not exist or cannot be copied.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="artifact-", dir=folder))
    source = Path(path)
    target = place / source.name
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy2(source, target)
    return str(target)
