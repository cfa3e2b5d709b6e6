"""Captures what an engine would write, and reads what it loads without running code from a file."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch

from accel_core.checkpoint import pickles

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

RECOVERY = "zero_to_fp32.py"
"""DeepSpeed's script that consolidates the 32-bit weights of a folder; DeepSpeed saves a copy in each."""

_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler:LossScaler",
    "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler",
    "deepspeed.runtime.zero.config:ZeroStageEnum",
    "deepspeed.utils.tensor_fragment:fragment_address",
)
"""DeepSpeed's classes that occur in its files; all hold plain values."""


class _Storage:
    """Replaces the object through which an engine writes and reads its files."""

    def __init__(self, own: object, known: Mapping[str, Any]) -> None:
        self._own = own
        self.files: dict[str, Any] = dict(known)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def save(self, state_dict: object, path: str) -> None:
        """Keep the content instead of writing it."""
        self.files[path] = state_dict

    def load(self, path: str, map_location: object = None) -> Any:
        """Return the content of a file, on the CPU."""
        path = str(path)
        # Never torch.load: a file's pickle could run code.
        return self.files[path] if path in self.files else read(Path(path).parent.parent, _name_of(path))


@contextmanager
def _instead(engine: DeepSpeedEngine, known: Mapping[str, Any]) -> Iterator[_Storage]:
    own = engine.checkpoint_engine
    engine.checkpoint_engine = storage = _Storage(own, known)
    try:
        yield storage
    finally:
        engine.checkpoint_engine = own


def save_from(engine: DeepSpeedEngine, tag: str) -> dict[str, Any]:
    """Return what this rank saves of an engine, by file name; every rank calls it."""
    with tempfile.TemporaryDirectory() as folder, _instead(engine, {}) as storage:
        engine.save_checkpoint(folder, tag=tag, save_latest=False)  # which file is the latest is accel's to say
        return {_name_of(path): _apart(content) for path, content in storage.files.items()}


def _apart(content: dict[str, Any]) -> dict[str, Any]:
    """Return a state with its own copy of the loss scaler, which later steps do not change."""
    inside = content.get("optimizer_state_dict")
    if not isinstance(inside, dict) or "loss_scaler" not in inside:
        return content
    return {**content, "optimizer_state_dict": {**inside, "loss_scaler": copy.copy(inside["loss_scaler"])}}


def expected(engine: DeepSpeedEngine, folder: Path, tag: str) -> list[str]:
    """Return the names of the files that this rank reads for an engine."""
    found = [engine._get_ckpt_name(str(folder), tag)]  # DeepSpeed's names depend on stage and rank
    if engine.zero_optimization():
        found.append(engine._get_zero_ckpt_name(str(folder), tag))
    return [_name_of(path) for path in found]


def read(folder: Path, name: str) -> Any:
    """Read a file of an engine; only plain data and DeepSpeed's own plain classes are accepted.

    Raises:
        CheckpointError: The file is damaged, or reading it would run code.
        FileNotFoundError: The file does not exist.
    """
    with torch.serialization.safe_globals(classes()):
        return pickles.read_object(folder, name)


def contents(engine: DeepSpeedEngine, folder: Path, wanted: Sequence[str]) -> dict[str, Any]:
    """Return the contents of the files that this rank reads for an engine, by name."""
    return {name: read(folder, name) for name in wanted}


def classes() -> list[Any]:
    """Return the classes of DeepSpeed that occur in its files."""
    return [resolve_name(each) for each in _CLASSES]


@contextmanager
def placeholders(known: Mapping[str, Any]) -> Iterator[Path]:
    """Create a folder of empty files: DeepSpeed checks which files exist before it asks for their contents."""
    with tempfile.TemporaryDirectory() as folder:
        for name in known:
            path = Path(folder) / name
            path.parent.mkdir(exist_ok=True)
            path.touch()
        yield Path(folder)


def load_into(engine: DeepSpeedEngine, folder: Path, tag: str, known: Mapping[str, Any]) -> None:
    """Load an engine from a checkpoint; every rank calls it."""
    with _instead(engine, {str(folder / name): content for name, content in known.items()}):
        engine.load_checkpoint(str(folder), tag=tag, load_lr_scheduler_states=False)  # accel restores schedules


def _name_of(path: str) -> str:
    return "/".join(Path(path).parts[-2:])
