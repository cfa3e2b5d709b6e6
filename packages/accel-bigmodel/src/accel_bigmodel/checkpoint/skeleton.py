"""An empty model with the tensors of a checkpoint, built from its headers: nothing else is read."""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_bigmodel.checkpoint.files import find_files, holds_gguf
from accel_bigmodel.checkpoint.gguf import GgufShard, packed_while_loading
from accel_bigmodel.meta import init_empty_weights
from accel_bigmodel.offload.index import header_of
from accel_core.checkpoint.names import SAFE_WEIGHTS_NAME
from accel_core.checkpoint.tensor_file import Header, StoredTensor
from accel_core.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    ConfigurationError,
    MissingDependencyError,
)
from accel_core.host.availability import is_transformers_available
from accel_core.modules.sizes import as_dtype


class Part(nn.Module):
    """A module whose tensors are all that is known."""


class Layer(Part):
    """A numbered module, one of several: it is not split."""


def skeleton_of(source: str | os.PathLike[str]) -> nn.Module:
    """Make an empty model from what is on disk.

    The class that a transformers config names is the model that will be loaded: its parts come in its own order.
    Headers have no order: their parts come as the index lists them, or by name, with numbers by value.

    Raises:
        CheckpointError: When a file is missing, damaged or unsafe.
        ConfigurationError: When the weights are not in safetensors files.
    """
    path = Path(source)
    failure: ConfigurationError | MissingDependencyError | None = None
    config = path / "config.json" if path.is_dir() else path.with_name("config.json")
    # A single shard has the whole model's configuration next to it, and is planned alone.
    if config.is_file() and (path.is_dir() or path.suffix == ".json" or path.name == SAFE_WEIGHTS_NAME):
        try:
            return _packed_as_stored(model_of_config(config.parent), path)
        except (ConfigurationError, MissingDependencyError) as found:
            failure = found
    if failure is not None and path == config:
        raise failure
    try:
        files, weight_map = find_files(path)
    except CheckpointNotFoundError:
        if failure is not None:
            raise failure from None
        raise
    entries: dict[str, StoredTensor] = {}
    aliases: dict[str, str] = {}
    for file in files:
        if not file.endswith((".safetensors", ".gguf")):
            raise ConfigurationError(
                f"Plans are made from the headers of safetensors and GGUF files; got {file!r}, which has none. Convert "
                "a pickled checkpoint to safetensors."
            )
        header = header_of(file)
        entries.update(header.tensors)
        if isinstance(header, Header):
            aliases.update({name: other for name, other in header.metadata.items() if other in header.tensors})
    order = sorted(entries, key=_by_number)
    if weight_map is not None and list(weight_map) != sorted(weight_map):
        # The index is not sorted: it lists the tensors in the model's order.
        order = [name for name in weight_map if name in entries]
    return _built({name: entries[name] for name in order}, {n: a for n, a in aliases.items() if n not in entries})


def _packed_as_stored(model: nn.Module, path: Path) -> nn.Module:
    """Let a model have empty packed parameters where a folder has packed weights."""
    if path.is_dir() and holds_gguf(path):
        with packed_while_loading(model, GgufShard(find_files(path)[0], model), lambda _, parameter: parameter.dtype):
            pass
    return model


def _by_number(name: str) -> list[tuple[bool, int, str]]:
    return [(not key.isdecimal(), int(key) if key.isdecimal() else 0, key) for key in name.split(".")]


def model_of_config(folder: str | os.PathLike[str], trust_remote_code: bool = False) -> nn.Module:
    """Make an empty model from a transformers configuration."""
    if not is_transformers_available():
        raise MissingDependencyError(
            "Building a model from its configuration needs transformers, which is not installed. Install it, or name "
            "a safetensors checkpoint, whose headers are enough."
        )
    names: list[str] = []
    try:
        import transformers

        config: Any = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        names += config.architectures or []
        cls = next((found for name in names if (found := getattr(transformers, name, None)) is not None), None)
        with init_empty_weights(include_buffers=True), _default_dtype(getattr(config, "dtype", None)):
            built: nn.Module = (
                transformers.AutoModel.from_config(config, trust_remote_code=trust_remote_code)
                if cls is None
                else cls(config)
            )
    except ImportError as failure:
        raise MissingDependencyError(
            f"A library that is needed to build {str(folder)!r} cannot be imported; got: {in_one_line(failure)} "
            "Install it."
        ) from failure
    except OSError as failure:
        if os.path.exists(folder):
            raise CheckpointDamagedError(
                f"A model's configuration cannot be read; got {str(folder)!r}: {in_one_line(failure)} Fetch it again."
            ) from failure
        raise CheckpointNotFoundError(
            f"The hub did not return the configuration of {str(folder)!r}; got: {in_one_line(failure)} Check the name, "
            "the connection and your access to it."
        ) from failure
    except ValueError as failure:
        raise ConfigurationError(
            f"The configuration names no model class; got architectures {names} and: {in_one_line(failure)} Add "
            "`architectures` to config.json."
        ) from failure
    return built


def in_one_line(failure: Exception) -> str:
    """Return the message of a library's error in one line that ends with a full stop."""
    return " ".join(str(failure).split()).rstrip(".") + "."


@contextlib.contextmanager
def _default_dtype(dtype: str | torch.dtype | None) -> Iterator[None]:
    """Set the default floating point dtype for a while, as transformers does if a configuration names one."""
    before = torch.get_default_dtype()
    wanted = as_dtype(dtype)
    torch.set_default_dtype(wanted if isinstance(wanted, torch.dtype) else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _built(entries: Mapping[str, StoredTensor], aliases: Mapping[str, str]) -> nn.Module:
    """Make a model from tensors by name, and other names for some of them."""
    numbered = Counter(
        ".".join(parts[:number])
        for parts in {tuple(name.split(".")[:-1]) for name in (*entries, *aliases)}
        for number in range(len(parts))
        if parts[number].isdecimal()
    )
    root = Part()
    made: dict[str, nn.Parameter] = {}
    for name in (*entries, *aliases):
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
        if leaf in module._modules or leaf in module._parameters:
            raise ConfigurationError(
                f"Two tensors of the checkpoint cannot be in one model; got {name!r} twice or as a module too. Save "
                "the checkpoint again."
            )
        if name in entries:
            tensor = torch.empty(entries[name].shape, dtype=entries[name].dtype, device="meta")
            made[name] = nn.Parameter(tensor, requires_grad=False)
        module.register_parameter(leaf, made[aliases.get(name, name)])
    return root
