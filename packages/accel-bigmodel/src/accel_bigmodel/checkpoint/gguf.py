"""The tensors of GGUF files under a model's own names, packed or as plain values."""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from accel_bigmodel.checkpoint.shard import Shard
from accel_bigmodel.gguf.blocks import KINDS, unpack
from accel_bigmodel.gguf.header import GgufForm, GgufHeader, library
from accel_bigmodel.gguf.packed import GGUF, GgufWeight
from accel_bigmodel.offload.index import InFile, MappedFile
from accel_core.checkpoint.tensor_file import StoredTensor
from accel_core.errors import CheckpointError, CheckpointMismatchError, CheckpointNotFoundError, undone_by
from accel_core.host.availability import is_transformers_available
from accel_core.modules.traversal import owner_of
from accel_core.modules.unwrap import canonical_name

_HEADS = {"head_count": "num_attention_heads", "head_count_kv": "num_key_value_heads"}


class GgufShard(Shard):
    """One GGUF file, or the parts of one that was split; what lies there as in the model is a view of a memory map."""

    def __init__(self, files: Sequence[str], model: nn.Module | None = None, *, packed: bool = True) -> None:
        self.path = files[0]
        self._files: dict[str, MappedFile] = {}
        self._forms: dict[str, GgufForm] = {}
        metadata: dict[str, object] = {}
        for path in files:
            file = MappedFile(path)
            header = file.header
            assert isinstance(header, GgufHeader)
            parts = header.metadata.get("split.count") or 1
            if parts != len(files) or self._forms.keys() & header.forms.keys():
                raise CheckpointNotFoundError(
                    f"The parts of a GGUF file do not belong together; got {len(files)}, and in {path!r} one of {parts}"
                    " or a tensor again. Keep all parts in one folder, under the names they were written with."
                )
            self._files.update(dict.fromkeys(header.forms, file))
            self._forms.update(header.forms)
            metadata = {**header.metadata, **metadata}
        names, self._processor = _names_for(model, metadata)
        self.entries: dict[str, StoredTensor] = {}
        self._stored: dict[str, list[str]] = {}
        self._orders: dict[str, torch.Tensor] = {}
        self._changed: set[str] = set()
        for stored in self._forms:
            name = names.get(stored) or names.get(stored.removesuffix(".weight"), stored)
            self._stored.setdefault(name, []).append(stored)
            self.entries.setdefault(name, self._files[stored].entries[stored])
            if stored in names:
                self._look_at(name, stored)
        own = () if model is None or not packed else model.named_parameters(remove_duplicate=False)
        asked = {canonical_name(name) for name, parameter in own if isinstance(parameter, GgufWeight)}
        self._kept = {
            name
            for name in self._stored
            if canonical_name(name) in asked and self.is_packed(name) and self.weight(name, empty=True) is not None
        }

    def _look_at(self, name: str, stored: str) -> None:
        """Find out what transformers does to a tensor, with an array in its place that takes little memory."""
        shape = self._forms[stored].shape
        if type(self._processor).__name__ == "LlamaTensorProcessor":
            # It puts rows into another order, and packed rows can be put so too.
            numbers = torch.arange(shape[0])
            order = torch.from_numpy(self._processed(numbers.view(-1, *[1] * (len(shape) - 1)).numpy(), stored))
            if not torch.equal(order.flatten(), numbers):
                self._orders[name] = order.flatten()
        else:
            sample = torch.tensor(-1.0).expand(shape).numpy()
            if self._processed(sample, stored) is not sample:
                self._changed.add(name)

    def _processed(self, values: Any, stored: str) -> Any:
        made: dict[str, torch.Tensor] = {}  # where a processor may put a tensor itself
        found = self._processor.process(weights=values, name=stored, parsed_parameters={"tensors": made})
        return next(iter(made.values())).numpy() if made else found.weights

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        first, *others = (self._forms[stored].shape for stored in self._stored[name])
        if name in self._changed:
            return tuple(self.tensor(name).shape)
        return (first[0], first[1] + sum(each[1] for each in others), *first[2:]) if others else first

    def is_packed(self, name: str) -> bool:
        """Return whether a tensor is of a type that torch does not compute with."""
        return self.entries[name].form == torch.uint8  # no plain type of the format is that

    def floating(self, name: str) -> bool:
        """Return whether a tensor holds floating point numbers, packed or not."""
        return self.is_packed(name) or super().floating(name)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor: packed where the model's is, a view of its file's map, or values that are made of it."""
        if name in self._kept:
            weight = self.weight(name)
            assert weight is not None
            return weight
        parts = [self._values(stored) for stored in self._stored[name]]
        if name in self._changed:
            return torch.from_numpy(self._processed(parts[0].float().numpy(), self._stored[name][0]))
        whole = torch.cat(parts, 1) if len(parts) > 1 else parts[0]  # gate and up of experts
        return whole[self._orders[name]] if name in self._orders else whole

    def _values(self, stored: str) -> torch.Tensor:
        raw, (kind, shape) = self._files[stored].tensor(stored), self._forms[stored]
        if raw.dtype != torch.uint8:
            return raw
        if kind in KINDS:
            return unpack(raw, kind, torch.float32)
        gguf = library()
        made: torch.Tensor = torch.from_numpy(gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]))
        return made.view(shape)

    def weight(self, name: str, *, empty: bool = False) -> GgufWeight | None:
        """Return a tensor that is packed or in another order as a weight of the model; None for any other.

        Gate and up of experts are joined, which copies their bytes; an empty weight has none.
        """
        stored, order = self._stored[name], self._orders.get(name)
        kind, *others = {self._forms[each].kind for each in stored}
        if others or name in self._changed or kind not in KINDS or (order is None and not self.is_packed(name)):
            return None
        parts = [self._files[each].tensor(each) for each in stored]
        parts = [each.to("meta") for each in parts] if empty else parts
        raw = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        return GgufWeight(raw, kind, self.shape(name), torch.float32, order)

    def check_type(self, name: str) -> None:
        """Make sure that a tensor of this type can stay packed."""
        stored = self._stored[name][0]
        kind = self._forms[stored].kind
        if self.is_packed(name) and kind not in KINDS:
            raise CheckpointError(
                f"Weights of this GGUF type cannot stay packed; got {kind} for {stored!r} in "
                f"{self._files[stored].path!r}. Pass dequantize=True, or convert the file to {', '.join(KINDS)}."
            )

    def in_file(self, name: str) -> InFile | None:
        """Return where a tensor lies that can be used in place; None for one whose values have to be written."""
        stored, *others = self._stored[name]
        if others or name in self._changed or (self.is_packed(name) and name not in self._kept):
            return None
        file = self._files[stored]
        place = {"gguf_file": os.path.abspath(file.path), "weight_name": stored, "stamp": file.stamp}
        return InFile(place, self.entries[name].dtype, self.weight(name))

    def done_with(self, name: str) -> None:
        """Release the memory of a tensor whose view is not in use."""
        for stored in self._stored[name]:
            self._files[stored].done_with(stored)


def _names_for(model: nn.Module | None, metadata: dict[str, object]) -> tuple[dict[str, str], Any]:
    """Return transformers' names of a file's tensors in a model, and what changes their values; empty without any."""
    config: Any = getattr(model, "config", None)
    architecture = metadata.get("general.architecture")
    known = (
        hasattr(config, "num_hidden_layers")
        and hasattr(config, "to_dict")
        and architecture in library().MODEL_ARCH_NAMES.values()
    )
    if not known or not is_transformers_available():
        return {}, None
    tables = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    settings = config.to_dict()
    for key, name in _HEADS.items():
        heads, own = metadata.get(f"{architecture}.attention.{key}"), settings.get(name)
        if isinstance(heads, int) and own is not None and heads != own:
            raise CheckpointMismatchError(
                f"A GGUF file was made of another model; got {key} {heads} in it and {name} {own} in "
                f"{type(model).__name__}. Load a file of this architecture."
            )
    processor = tables.TENSOR_PROCESSORS.get(architecture, tables.TensorProcessor)(config=settings)
    return tables.get_gguf_hf_weights_map(model, processor, model_type=architecture), processor


@contextlib.contextmanager
def packed_while_loading(
    model: nn.Module, shard: GgufShard, dtype_for: Callable[[str, torch.Tensor], torch.dtype | None]
) -> Iterator[None]:
    """Let a model have empty packed parameters for the packed weights of a file; after a failure, its own again.

    Raises:
        CheckpointError: When a weight is of a type that cannot stay packed.
    """
    stored = {canonical_name(name): name for name in shard.entries}
    own = list(model.named_parameters(remove_duplicate=False))
    made: dict[int, nn.Parameter] = {}  # by the parameter, which may have other names too
    for name, parameter in own:
        found = stored.get(canonical_name(name))
        if found is None or type(parameter) is not nn.Parameter or shard.shape(found) != parameter.shape:
            continue
        shard.check_type(found)
        weight = shard.weight(found, empty=True)
        # Plain rows in another order stay as they are on the disk alone.
        if weight is not None and shard.is_packed(found) and id(parameter) not in made:
            dtype = dtype_for(name, parameter) or parameter.dtype
            made[id(parameter)] = GGUF.move(weight.to(dtype), torch.device("meta"))
    before: list[tuple[dict[str, Any], str, nn.Parameter]] = []

    def put_back() -> None:
        for parameters, key, parameter in before:
            parameters[key] = parameter

    with undone_by(put_back):
        for name, parameter in own:
            if id(parameter) in made:
                owner, key = owner_of(model, name)
                before.append((owner._parameters, key, parameter))
                owner._parameters[key] = made[id(parameter)]
        yield
