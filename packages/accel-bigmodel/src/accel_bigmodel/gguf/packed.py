"""Weights that stay packed in memory, and are unpacked by each operation that computes with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from accel_bigmodel._torch import make_wrapper, tree_map_only
from accel_bigmodel.gguf.blocks import unpack
from accel_core.errors import CheckpointMismatchError, QuantizationError
from accel_core.modules import packed

_ATEN = torch.ops.aten


class GgufWeight(torch.Tensor):
    """A weight with the shape and dtype of its values, whose memory holds the packed bytes of a GGUF file.

    Attributes:
        raw: The packed rows, or values that are stored in another order.
        kind: Their type, by its name in the format.
        order: The numbers of the stored rows in the order of the weight's; None where they lie so.
        turned: Whether the weight is the stored matrix transposed.
    """

    raw: torch.Tensor
    kind: str
    order: torch.Tensor | None
    turned: bool

    def __new__(
        cls, raw: torch.Tensor, kind: str, shape: Sequence[int], dtype: torch.dtype,
        order: torch.Tensor | None = None, turned: bool = False,
    ) -> GgufWeight:  # fmt: skip
        """Wrap packed rows."""
        packed.register(GGUF)  # not on import: without any packed format, models are planned faster
        made: GgufWeight = make_wrapper(cls, shape, dtype=dtype, device=raw.device, requires_grad=False)
        made.raw, made.kind, made.order, made.turned = raw, kind, order, turned
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        """Show the form and no values."""
        return f"GgufWeight({self.kind}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __reduce_ex__(self, protocol: object) -> str | tuple[Any, ...]:
        """Pickle the values: who reads the file may not have this class."""
        plain: Any = nn.Parameter(self.values(), requires_grad=False)
        reduced: tuple[Any, ...] = plain.__reduce_ex__(protocol)
        return reduced

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        """Name the tensors it consists of, for `torch.compile` and `Module.to`, and give the rest."""
        own = ["raw"] if self.order is None else ["raw", "order"]
        return own, (self.kind, self.shape, self.dtype, self.turned)

    @staticmethod
    def __tensor_unflatten__(
        own: dict[str, torch.Tensor], rest: tuple[Any, ...], size: object, stride: object
    ) -> GgufWeight:
        """Make the weight of what `__tensor_flatten__` gave."""
        kind, shape, dtype, turned = rest
        return GgufWeight(own["raw"], kind, shape, dtype, own.get("order"), turned)

    @property
    def is_by_rows(self) -> bool:
        """Whether the first size counts parts whose bytes follow each other."""
        return self.order is None and not self.turned

    def row(self, raw: torch.Tensor, shape: Sequence[int]) -> GgufWeight:
        """Return a weight of this type made of bytes of some rows."""
        return GgufWeight(raw, self.kind, shape, self.dtype)

    def like(self, raw: torch.Tensor, dtype: torch.dtype | None = None) -> GgufWeight:
        """Return a weight of the same form with other bytes."""
        # Moved with the bytes, not for each operation, which would wait for it; an empty weight keeps the numbers.
        order = self.order if self.order is None or raw.is_meta else self.order.to(raw.device)
        return GgufWeight(raw, self.kind, self.shape, dtype or self.dtype, order, self.turned)

    def values(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the values, or those of some rows alone."""
        raw = self.raw.view(torch.uint8)
        order = None if self.order is None else self.order.to(raw.device)
        if rows is not None:
            order = rows if order is None else order.index_select(0, rows)
        # By `index_select`, which refuses numbers below zero as a plain embedding does.
        found = unpack(raw if order is None else raw.index_select(0, order), self.kind, self.dtype)
        return found.t() if self.turned else found

    def share_memory_(self, *_: object, **__: object) -> NoReturn:
        """Refuse: torch would read memory of values that is not there, which ends the process."""
        raise QuantizationError(
            f"A packed weight has no memory of values that could be shared or changed in place; got {self!r}. Load the "
            "file with dequantize=True, or in each process."
        )

    apply_ = map_ = map2_ = __dlpack__ = share_memory_

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Keep a weight packed that is only moved, cast or transposed; unpack it for any other operation."""
        kwargs = kwargs or {}
        kept = _KEPT.get(func)
        if kept is not None and isinstance(args[0], GgufWeight):
            return kept(*args, **kwargs)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, GgufWeight):
                raise _written(value, func)
        args, kwargs = tree_map_only(GgufWeight, GgufWeight.values, (args, kwargs))
        return func(*args, **kwargs)


def _written(weight: GgufWeight, func: object) -> QuantizationError:
    return QuantizationError(
        f"A packed weight cannot be written to; got {func} for {weight!r}. Load the file with dequantize=True."
    )


def _filled(weight: GgufWeight, value: torch.Tensor, *_: object) -> GgufWeight:
    values = value.values() if isinstance(value, GgufWeight) else value
    if not torch.equal(weight.values(), values.to(weight.device, weight.dtype)):
        raise _written(weight, "other values")
    return weight


def _same(weight: GgufWeight) -> GgufWeight:
    return weight.like(weight.raw)


def _cloned(weight: GgufWeight, **_: object) -> GgufWeight:
    return weight.like(weight.raw.clone())


def _moved(
    weight: GgufWeight, dtype: torch.dtype | None = None, device: torch.device | None = None,
    non_blocking: bool = False, **_: object,
) -> torch.Tensor:  # fmt: skip
    if dtype is not None and not dtype.is_floating_point:
        return weight.values().to(dtype=dtype, device=device)
    return weight.like(weight.raw.to(device=device, non_blocking=non_blocking), dtype)


def _turned(weight: GgufWeight) -> GgufWeight:
    return GgufWeight(weight.raw, weight.kind, weight.shape[::-1], weight.dtype, weight.order, not weight.turned)


def _selected(weight: GgufWeight, dim: int, number: int) -> torch.Tensor:
    if dim or weight.dim() < 3 or not weight.is_by_rows:
        return weight.values().select(dim, number)
    return weight.row(weight.raw.view(torch.uint8)[number], weight.shape[1:])


def _looked_up(weight: GgufWeight, numbers: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    if weight.turned:
        return nn.functional.embedding(numbers, weight.values())
    return weight.values(numbers.flatten()).view(*numbers.shape, -1)


def _used(weight: GgufWeight, stream: torch.Stream) -> None:
    for part in (weight.raw, weight.order):
        if part is not None and part.device == weight.device:
            part.record_stream(stream)


_KEPT: dict[Any, Callable[..., Any]] = {
    _ATEN.detach.default: _same,
    _ATEN.alias.default: _same,
    _ATEN.clone.default: _cloned,
    _ATEN.copy_.default: _filled,
    _ATEN._to_copy.default: _moved,
    _ATEN.t.default: _turned,
    _ATEN.select.int: _selected,
    _ATEN.embedding.default: _looked_up,
    _ATEN.record_stream.default: _used,
}
"""What is done without all of a weight's values. A transposed weight, which a linear layer computes with, stays packed
because autograd keeps it until the backward pass; so does one expert of a stack. A checkpoint that was saved with the
weight has the same values, which change nothing."""


class _GgufForm:
    """Weights of GGUF files, as code that places and offloads them sees them."""

    name = "gguf"

    def matches(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter is packed so."""
        return isinstance(parameter, GgufWeight)

    def nbytes(self, parameter: torch.Tensor) -> int:
        """Count the packed bytes."""
        return _weight(parameter).raw.nbytes

    def move(self, parameter: torch.Tensor, device: torch.device) -> nn.Parameter:
        """Return the weight on another device."""
        weight = _weight(parameter)
        return _parameter(weight.like(weight.raw.to(device)))

    def pack(
        self, parameter: torch.Tensor, value: torch.Tensor, device: torch.device, statistics: torch.Tensor | None = None
    ) -> nn.Parameter:
        """Take a weight that is packed; plain values, of another checkpoint, become a plain parameter."""
        if value.shape != parameter.shape:
            raise CheckpointMismatchError(
                f"The weight does not fit its place; got shape {tuple(value.shape)} for {tuple(parameter.shape)}. Load "
                "a checkpoint of the same architecture."
            )
        return _parameter(value.detach().to(device=device, dtype=parameter.dtype))

    def parts(self, parameter: torch.Tensor) -> Sequence[str]:
        """Name the packed bytes, which are all."""
        return ("",)

    def unpack(self, parameter: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the packed bytes."""
        return {"": _weight(parameter).raw}

    def rebuild(
        self, parameter: torch.Tensor, stored: Mapping[str, torch.Tensor], device: torch.device
    ) -> nn.Parameter:
        """Make the weight out of its packed bytes."""
        return _parameter(_weight(parameter).like(stored[""].to(device)))


def _weight(parameter: torch.Tensor) -> GgufWeight:
    assert isinstance(parameter, GgufWeight)
    return parameter


def _parameter(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


GGUF = _GgufForm()
"""The format of weights that stay as a GGUF file has them, registered with the first of them."""
