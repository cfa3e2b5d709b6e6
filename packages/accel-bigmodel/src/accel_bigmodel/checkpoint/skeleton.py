"""An empty model with the tensors of a checkpoint, built from its headers: nothing else is read."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_bigmodel.checkpoint.read import find_files
from accel_bigmodel.meta import init_empty_weights
from accel_bigmodel.offload.index import header_of
from accel_core.checkpoint.tensor_header import StoredTensor
from accel_core.errors import CheckpointNotFoundError, ConfigurationError, MissingDependencyError
from accel_core.host.availability import is_transformers_available

__all__ = ["Layer", "Part", "model_of_config", "skeleton_of"]


class Part(nn.Module):
    """A module of which only the tensors are known."""


class Layer(Part):
    """A numbered module, one of several: it is placed whole."""


def skeleton_of(source: str | os.PathLike[str]) -> nn.Module:
    """Make an empty model out of what is on disk.

    Args:
        source: A safetensors file, an index, a folder with either, or a folder or file with a transformers config.

    Returns:
        A model on the meta device. Out of headers it is made of `Part` and `Layer` modules; out of a config it is the
        real class.

    Raises:
        CheckpointError: When a file is missing, damaged or unsafe.
        ConfigurationError: When the weights are not in safetensors files.
    """
    path = Path(source)
    config = path / "config.json" if path.is_dir() else path
    try:
        files, _ = find_files(path)
    except CheckpointNotFoundError:
        if config.is_file():
            return model_of_config(config.parent)
        raise
    if path.is_file() and path.name == "config.json":
        return model_of_config(path.parent)
    entries: dict[str, StoredTensor] = {}
    for file in files:
        if not file.endswith(".safetensors"):
            raise ConfigurationError(
                f"Only headers are read, and {file!r} has none: pickled weights would have to be loaded. Found a "
                f"{Path(file).suffix or 'nameless'} file. Convert the checkpoint to safetensors."
            )
        entries.update(header_of(file))
    return _built(entries)


def model_of_config(folder: str | os.PathLike[str], trust_remote_code: bool = False) -> nn.Module:
    """Make an empty model out of a transformers configuration.

    Args:
        folder: A folder with `config.json`, or a name that transformers knows.
        trust_remote_code: Whether code beside the configuration may run.

    Returns:
        The model, on the meta device.

    Raises:
        MissingDependencyError: When transformers is not installed.
        ConfigurationError: When the configuration names no model class.
    """
    if not is_transformers_available():
        raise MissingDependencyError(
            "A model can be built from its configuration by transformers. Found no transformers. Install it, or name a "
            "safetensors checkpoint, whose headers are enough."
        )
    import transformers

    config: Any = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    names = list(getattr(config, "architectures", None) or [])
    with init_empty_weights(include_buffers=True):
        for name in names:
            cls = getattr(transformers, name, None)
            if cls is not None:
                built: nn.Module = cls(config)
                return built
        try:
            model: nn.Module = transformers.AutoModel.from_config(config, trust_remote_code=trust_remote_code)
        except ValueError as failure:
            raise ConfigurationError(
                f"The configuration names no model class. Found architectures {names} and {failure} Add "
                "`architectures` to config.json."
            ) from failure
        return model


def _built(entries: dict[str, StoredTensor]) -> nn.Module:
    numbered = Counter(
        ".".join(parts[:number])
        for parts in {tuple(name.split(".")[:-1]) for name in entries}
        for number in range(len(parts))
        if parts[number].isdecimal()
    )
    root = Part()
    for name, entry in entries.items():
        *path, leaf = name.split(".")
        module: nn.Module = root
        for number, key in enumerate(path):
            if key not in module._modules:
                inside_layer = isinstance(module, Layer)
                is_layer = key.isdecimal() and numbered[".".join(path[:number])] > 1 and not inside_layer
                module.add_module(key, Layer() if is_layer else Part())
            child = module._modules[key]
            assert child is not None
            module = child
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        if leaf in module._modules or leaf in module._parameters:
            raise ConfigurationError(
                f"Two tensors of the checkpoint cannot be in one model. Found {name!r} twice or as a module too. Save "
                "the checkpoint again."
            )
        module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return root
