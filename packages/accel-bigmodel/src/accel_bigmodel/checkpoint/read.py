"""The tensors of a checkpoint by name, whatever files it consists of; nothing is read before it is needed."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_bigmodel.checkpoint.files import find_files
from accel_bigmodel.checkpoint.gguf import GgufShard
from accel_bigmodel.checkpoint.shard import Shard
from accel_bigmodel.device_map.check import device_of
from accel_bigmodel.offload.index import InFile, MappedFile
from accel_core.checkpoint.pickles import load_object, open_plain
from accel_core.errors import CheckpointDamagedError
from accel_core.modules.unwrap import canonical_name


class SafetensorsShard(Shard):
    """A safetensors file of a checkpoint: its tensors are views of a memory map."""

    def __init__(self, path: str) -> None:
        self.path = path
        # A map of its own: a model that takes the views may write to them, and no other model shall see that.
        self.file = MappedFile(path)
        self.entries = self.file.entries

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        return self.file.tensor(name)

    def in_file(self, name: str) -> InFile:
        """Return where a tensor lies."""
        place = {"safetensors_file": os.path.abspath(self.path), "weight_name": name, "stamp": self.file.stamp}
        return InFile(place, self.file.entries[name].dtype)

    def done_with(self, name: str) -> None:
        """Release the memory of a tensor whose view is not in use."""
        self.file.done_with(name)


class PickledShard(Shard):
    """A file of `torch.save` with a state dict: mapped where its format allows it, and read without running code."""

    entries: dict[str, torch.Tensor]

    def __init__(self, path: str) -> None:
        self.path = path
        self.entries = _read_pickle(path)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        return self.entries[name]

    def own(self, name: str) -> torch.Tensor:
        """Return a tensor in memory of its own, which no other tensor has, nor the file, which may be written again."""
        return self.tensor(name).clone()

    def done_with(self, name: str) -> None:
        """Let a tensor go."""
        self.entries.pop(name, None)


def _read_pickle(path: str) -> dict[str, torch.Tensor]:
    with open_plain(path) as file:
        content: object = load_object(file, Path(path), mmap=True)
    if not isinstance(content, Mapping):
        raise CheckpointDamagedError(
            f"A checkpoint file has to hold a state dict; got a {type(content).__name__} in {path!r}. Save "
            "`model.state_dict()`."
        )
    return {str(name): value for name, value in content.items() if isinstance(value, torch.Tensor)}


def open_shard(path: str | os.PathLike[str]) -> Shard:
    """Open one file of a checkpoint.

    Raises:
        CheckpointNotFoundError: When the file does not exist.
        UnsafeCheckpointError: When it is not a regular file.
        CheckpointDamagedError: When it is truncated or something else.
    """
    path = os.fspath(path)
    if path.endswith(".gguf"):
        return GgufShard(find_files(path)[0])
    return SafetensorsShard(path) if path.endswith(".safetensors") else PickledShard(path)


class Checkpoint:
    """All tensors of a checkpoint."""

    def __init__(self, shards: Sequence[Shard], weight_map: Mapping[str, str] | None) -> None:
        self.shards = shards
        self._shard_of: dict[str, Shard] = {}
        by_path = {shard.path: shard for shard in shards}
        if weight_map is not None:
            for name, path in weight_map.items():
                self._shard_of[name] = by_path[path]
                if name not in by_path[path].entries:
                    raise CheckpointDamagedError(
                        f"A shard does not hold a tensor that its index places there; got {name!r} in {path!r}. Fetch "
                        "or save the checkpoint again."
                    )
        else:
            for shard in shards:
                self._shard_of.update(dict.fromkeys(shard.entries, shard))
        self.canonical = {name: canonical_name(name) for name in self._shard_of}
        # Backwards: of several names of one tensor the first counts.
        self._stored = {plain: name for name, plain in reversed(self.canonical.items())}

    def __contains__(self, name: object) -> bool:
        """Return whether the checkpoint holds a tensor."""
        return name in self._shard_of

    def __iter__(self) -> Iterator[str]:
        """Iterate over the tensors' names."""
        return iter(self._shard_of)

    def name_of(self, name: str) -> str | None:
        """Find the name under which the checkpoint holds a tensor of a model, even if one of them is compiled."""
        return name if name in self._shard_of else self._stored.get(canonical_name(name))

    def shard_of(self, name: str) -> Shard:
        """Return the file that holds a tensor."""
        return self._shard_of[name]

    def own(self, name: str) -> torch.Tensor:
        """Return a tensor whose memory no other one has that was returned."""
        return self._shard_of[name].own(name)


def open_checkpoint(
    checkpoint: str | os.PathLike[str], model: nn.Module | None = None, *, packed: bool = True
) -> Checkpoint:
    """Open a checkpoint; every header is read and checked.

    A GGUF file's tensors get the names that they have in a model, and stay packed where its parameters are, if allowed.

    Raises:
        CheckpointError: As `open_shard` does, and when a folder holds none, or several to choose from.
    """
    files, weight_map = find_files(checkpoint)
    if files[0].endswith(".gguf"):
        return Checkpoint([GgufShard(files, model, packed=packed)], None)
    return Checkpoint([open_shard(file) for file in files], weight_map)


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Read a weights file, each tensor straight onto its device.

    Args:
        checkpoint_file: A `.safetensors` or `.gguf` file, or one written by `torch.save`. Packed weights of GGUF are
            unpacked, and have the names that the file gives them.
        device_map: Devices by name of submodule or tensor. What goes to "disk" or has no device stays on the CPU, in
            the file's memory map.

    Returns:
        The tensors by name.

    Raises:
        CheckpointError: When the file is missing, damaged, or would run code.

    Examples:
        >>> weights = load_state_dict("checkpoint/model.safetensors", device_map={"": "cpu"})
        >>> weights["head.weight"].shape
        torch.Size([10, 64])
    """
    shard = open_shard(checkpoint_file)
    tensors: dict[str, torch.Tensor] = {}
    for name in shard.entries:
        device = None if device_map is None else device_of(name, device_map)
        tensor = shard.tensor(name)
        tensors[name] = tensor if device in (None, "disk", "cpu") else tensor.to(device)
    return tensors
