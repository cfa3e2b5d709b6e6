"""What held memory, told below the traceback of a process that ends because memory ran out."""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from types import TracebackType

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from accel_core.devices.device import module_of
from accel_core.devices.memory import peak_memory, should_reduce_batch_size
from accel_core.host.run_card import MEMORY_RAN_OUT
from accel_core.mesh.tensor import local_memory
from accel_core.modules.sizes import written_size
from accel_core.modules.unwrap import canonical_name

_SHOWN = 3
_Named = tuple[str, str, object]
"""A kind of holder, the name of one, and what it holds."""


@functools.cache  # once in a process
def report_oom(device: torch.device, rank: int) -> None:
    """On an uncaught out-of-memory error, print what held the memory."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        full = _exhausted(error, device)
        if full is not None:
            text = "\n".join(_lines(trace, full))
            sys.stderr.write(f"{MEMORY_RAN_OUT} on rank {rank}. What held it:\n{text}\n")

    sys.excepthook = show


def _exhausted(error: BaseException | None, device: torch.device) -> torch.device | None:
    """Return the device whose memory an error, or one that led to it, says is full."""
    while error is not None:
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
            return torch.device("cpu")
        if isinstance(error, Exception) and should_reduce_batch_size(error):
            return device
        error = error.__cause__ or error.__context__
    return None


def _lines(trace: TracebackType | None, device: torch.device) -> Iterator[str]:
    """Yield a line for each kind of holder, the largest first, and one for all memory."""
    seen = {0}  # of what has no memory
    held: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for kind, name, value in _holders(trace):
        for leaf in tree_leaves(value):
            if not issubclass(type(leaf), torch.Tensor):
                continue
            own = local_memory(leaf)
            storage = own.untyped_storage() if own.layout is torch.strided else None
            if storage is None or storage.device.type != device.type or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            shape = f"{str(own.dtype).removeprefix('torch.')} of shape {tuple(own.shape)}"
            held[kind][name or shape] += storage.nbytes()
    for kind, names in sorted(held.items(), key=lambda item: -item[1].total()):
        largest = [f"{name} {written_size(size)}" for name, size in names.most_common(_SHOWN)]
        rest = " …" if len(names) > _SHOWN else ""
        yield f"  {kind:<16}  {written_size(names.total()):>10}  {', '.join(largest)}{rest}"
    known = sum(names.total() for names in held.values())
    allocated = getattr(module_of(device.type), "memory_allocated", None)
    if device.type == "cpu" or allocated is None:
        most = written_size(peak_memory(torch.device("cpu")))
        yield f"  {'the process':<16}  {most:>10}  at its most, with what is kept for backward"
    else:
        rest = written_size(max(0, allocated(device) - known))
        yield f"  {'no tensor above':<16}  {rest:>10}  what is kept for backward, and of libraries"


def _holders(trace: TracebackType | None) -> Iterator[_Named]:
    """Yield what may hold memory, with the names that a user knows first."""
    objects = gc.get_objects()
    modules = [each for each in objects if issubclass(type(each), nn.Module)]
    inner = {id(child) for each in modules for child in each.children()}
    names: dict[int, str] = {}
    for model in (each for each in modules if id(each) not in inner):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            names[id(tensor)] = canonical_name(name).removeprefix("module.")  # as copies have it
            yield "parameters" if isinstance(tensor, nn.Parameter) else "buffers", names[id(tensor)], tensor
            yield "gradients", names[id(tensor)], tensor.grad if tensor.is_leaf else None
    for optimizer in (each for each in objects if issubclass(type(each), torch.optim.Optimizer)):
        for kind, own in (("optimizer", "state"), ("averages", "averages")):
            states = getattr(optimizer, own, None)
            for tensor, state in states.items() if isinstance(states, Mapping) else ():
                yield kind, names.get(id(tensor), ""), state
    while trace is not None:
        code = trace.tb_frame.f_code
        for name, value in trace.tb_frame.f_locals.items():
            yield "other tensors", f"{name} in {code.co_name}", value
        trace = trace.tb_next
    yield "other tensors", "", [each for each in objects if issubclass(type(each), torch.Tensor)]
