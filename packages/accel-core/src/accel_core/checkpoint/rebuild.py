"""The closed list of what a pickled file may rebuild: tensors inside their storages, and plain containers.

torch's own list for `weights_only` holds more than data needs. Its constructors (`torch.Tensor(n)`,
`UntypedStorage(n)`) give memory that nobody wrote, sparse tensors are made without a look at their indices, which later
uses follow out of bounds, and any codec of Python can be named. A file that is read here reaches none of that.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pickle import UnpicklingError
from types import ModuleType
from typing import Any

import torch
from torch.storage import TypedStorage

from accel_core._torch import get_layout, rebuilders, sparse_to_validate, tensor_rebuilders
from accel_core._torch import weights_only_unpickler as unpickler
from accel_core.checkpoint.arrays import only_safe_globals, tensor_of_array

__all__ = ["closed_list"]

# torch's functions without types.
_utils: ModuleType = rebuilders
_tensor: ModuleType = tensor_rebuilders
_StorageType: Any = torch.serialization.StorageType
_lock = threading.RLock()


@contextmanager
def closed_list(extra: list[Any]) -> Iterator[None]:
    """Let `torch.load(weights_only=True)` rebuild what this module and `arrays` name, and what the user declared.

    Threads read one after the other: torch keeps its lists for the whole process.
    """
    with _lock, only_safe_globals(extra):
        listed: Any = unpickler._get_allowed_globals
        checked: Any = torch.sparse.check_sparse_tensor_invariants
        before = checked.is_enabled()
        # Replaced, not added to: torch asks its own list first, so nothing that is declared can narrow it.
        unpickler._get_allowed_globals = _allowed
        checked.enable()  # torch.load compares the indices of sparse tensors with their shapes only then
        try:
            yield
        finally:
            unpickler._get_allowed_globals = listed
            if not before:
                checked.disable()
            # A load that failed leaves its sparse tensors here, and the next load would be refused for them.
            sparse_to_validate().clear()


class _TensorName:
    """Stands for `torch.Tensor` where a file names it as a type; unlike the type it cannot be called."""


_TENSOR = _TensorName()
_PLAIN = (OrderedDict, Counter, set, complex, torch.Size, torch.device, get_layout)


@functools.cache
def _allowed() -> dict[str, Any]:
    """Return the values of torch's list that cannot be called or are harmless, and checked functions for the rest."""
    values = (torch.dtype, torch.qscheme, torch.serialization.StorageType)
    listed = _torchs_list()
    kept = {name: one for name, one in listed.items() if isinstance(one, values) or one in _PLAIN}
    return kept | {
        "torch.Tensor": _TENSOR,
        "torch.storage.UntypedStorage": _StorageType("ByteStorage"),
        "torch.nn.parameter.Parameter": torch.nn.Parameter,
        "_codecs.encode": _encode,
        "builtins.bytearray": _bytearray,
        "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
        **{f"torch._utils.{name}": function for name, function in _REBUILDERS.items()},
    }


_torchs_list = unpickler._get_allowed_globals


def _refuse(what: str) -> UnpicklingError:
    return UnpicklingError(f"Unsupported class: {what}")


def _encode(text: object, encoding: object = "utf-8", *_: object) -> bytes:
    """Make the bytes that protocol 2 writes as text; no other codec is looked up."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise _refuse("text in another encoding than latin1")
    return text.encode("latin1")


def _bytearray(content: object = b"", encoding: object = "latin-1") -> bytearray:
    """Make a bytearray from its content; from a number, the type would take that much memory."""
    if type(content) is str:
        return bytearray(_encode(content, encoding))
    if type(content) is not bytes:
        raise _refuse("a bytearray that is not made from its bytes")
    return bytearray(content)


# Arguments are annotated as torch writes them. A file may hold anything else, which the checks look for.
def _check_extent(
    storage: TypedStorage, offset: int, size: Sequence[int], stride: Sequence[int], itemsize: int
) -> None:
    """Make sure that a tensor lies inside its storage; torch would lengthen one that it may."""
    if not isinstance(storage, TypedStorage):
        raise _refuse(f"a tensor whose storage is a {type(storage).__name__}")
    numbers = (offset, *size, *stride)
    if len(size) != len(stride) or not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise UnpicklingError("damaged tensor: a size, stride or offset that is not one")
    last = offset + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    if 0 not in size and (last + 1) * itemsize > storage._untyped_storage.nbytes():
        raise UnpicklingError("damaged tensor: it ends behind its storage")


def _check_hooks(hooks: object) -> None:
    if hooks:
        raise _refuse("a tensor with hooks")


def _rebuild_tensor(storage: TypedStorage, offset: int, size: Sequence[int], stride: Sequence[int]) -> object:
    _check_extent(storage, offset, size, stride, storage.dtype.itemsize)
    return _utils._rebuild_tensor(storage, offset, size, stride)


def _rebuild_tensor_v2(
    storage: TypedStorage,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    grad: object,
    hooks: object,
    metadata: object = None,
) -> object:
    _check_extent(storage, offset, size, stride, storage.dtype.itemsize)
    _check_hooks(hooks)
    return _utils._rebuild_tensor_v2(storage, offset, size, stride, grad, hooks, metadata)


def _rebuild_tensor_v3(
    storage: TypedStorage,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    grad: object,
    hooks: object,
    dtype: torch.dtype,
    metadata: object = None,
) -> object:
    _check_extent(storage, offset, size, stride, dtype.itemsize)
    _check_hooks(hooks)
    return _utils._rebuild_tensor_v3(storage, offset, size, stride, grad, hooks, dtype, metadata)


def _rebuild_qtensor(
    storage: TypedStorage,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    quantizer: Sequence[object],
    grad: object,
    hooks: object,
) -> object:
    _check_extent(storage, offset, size, stride, storage.dtype.itemsize)
    _check_hooks(hooks)
    if math.prod(size) * storage.dtype.itemsize > storage._untyped_storage.nbytes():
        raise UnpicklingError("damaged tensor: quantized, and larger than its storage")
    for one in quantizer[1:3] if len(quantizer) == 4 else ():
        # The kernels read scales and zero points by raw index, in the dtypes that the constructor was made for.
        if not isinstance(one, torch.Tensor) or one.layout != torch.strided or one.dim() != 1:
            raise UnpicklingError("damaged tensor: quantized with scales that are no row of numbers")
    return _utils._rebuild_qtensor(storage, offset, size, stride, quantizer, grad, hooks)


def _rebuild_parameter(data: object, grad: object, hooks: object) -> object:
    _check_tensor(data)
    _check_hooks(hooks)
    return _utils._rebuild_parameter(data, grad, hooks)


def _rebuild_parameter_with_state(data: object, grad: object, hooks: object, state: object) -> object:
    _check_tensor(data)
    _check_hooks(hooks)
    _check_attributes(torch.nn.Parameter, state)
    return _utils._rebuild_parameter_with_state(data, grad, hooks, state)


def _rebuild_sparse_tensor(layout: object, data: Iterable[object]) -> object:
    for one in data:
        if isinstance(one, torch.Tensor) and one.layout != torch.strided:
            raise UnpicklingError("damaged tensor: sparse parts of a sparse tensor")
    return _utils._rebuild_sparse_tensor(layout, data)


def _rebuild_meta_tensor(dtype: object, size: object, stride: object, grad: object) -> object:
    return _utils._rebuild_meta_tensor_no_storage(dtype, size, stride, grad)


def _rebuild_on_device(data: torch.Tensor, dtype: object, device: object, grad: object) -> object:
    _check_tensor(data)
    if data.layout != torch.strided or data.is_quantized:
        raise UnpicklingError("damaged tensor: one of a device that is not made from plain values")
    return _utils._rebuild_device_tensor_from_cpu_tensor(data, dtype, device, grad)


def _rebuild_on_device_from_array(data: object, dtype: object, device: object, grad: object) -> object:
    return _rebuild_on_device(tensor_of_array(data), dtype, device, grad)


def _rebuild_wrapper_subclass(kind: object, *arguments: object) -> object:
    if kind not in _declared():
        raise _refuse("a wrapper of tensors that nobody declared")
    return _utils._rebuild_wrapper_subclass(kind, *arguments)


def _rebuild_from_type(function: object, kind: object, arguments: object, state: object) -> object:
    """Rebuild a tensor that has attributes, or one of a class that the user declared."""
    kind = torch.Tensor if kind is _TENSOR else kind
    if function not in _REBUILDERS.values() or not (kind in (torch.Tensor, torch.nn.Parameter) or kind in _declared()):
        raise _refuse("a tensor of a class that nobody declared")
    if kind in (torch.Tensor, torch.nn.Parameter):
        _check_attributes(kind, state)
    return _tensor._rebuild_from_type_v2(function, kind, arguments, state)


def _check_tensor(data: object) -> None:
    if not isinstance(data, torch.Tensor):
        raise _refuse(f"a parameter made from a {type(data).__name__}")


def _check_attributes(kind: type, state: object) -> None:
    """Refuse attributes that hide what every tensor has: a file could make `detach` a number."""
    parts: Sequence[Any] = state if isinstance(state, tuple) else (state,)
    for part in parts:
        if any(type(name) is not str or hasattr(kind, name) for name in part or ()):
            raise _refuse("a tensor with attributes that hide its own")


def _declared() -> list[Any]:
    return [one[0] if isinstance(one, tuple) else one for one in torch.serialization.get_safe_globals()]


_REBUILDERS: dict[str, Callable[..., Any]] = {
    "_rebuild_parameter": _rebuild_parameter,
    "_rebuild_parameter_with_state": _rebuild_parameter_with_state,
    "_rebuild_qtensor": _rebuild_qtensor,
    "_rebuild_tensor": _rebuild_tensor,
    "_rebuild_tensor_v2": _rebuild_tensor_v2,
    "_rebuild_tensor_v3": _rebuild_tensor_v3,
    "_rebuild_sparse_tensor": _rebuild_sparse_tensor,
    "_rebuild_meta_tensor_no_storage": _rebuild_meta_tensor,
    "_rebuild_wrapper_subclass": _rebuild_wrapper_subclass,
    "_rebuild_device_tensor_from_numpy": _rebuild_on_device_from_array,
    "_rebuild_device_tensor_from_cpu_tensor": _rebuild_on_device,
}
