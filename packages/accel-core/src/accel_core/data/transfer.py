"""Moving batches to the device, beside the computation where the device can."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from accel_core.comm.batch import send_to_device
from accel_core.comm.tree import tree_leaves
from accel_core.devices.device import module_of

_END = object()


def placed(stream: Iterator[Any], device: torch.device | None, *, overlapped: bool = False) -> Iterator[Any]:
    """Return an iterator over batches that lie on a device."""
    # Where there is no accelerator, all tensors lie on the CPU already.
    if device is None or (device.type == "cpu" and not torch.accelerator.is_available()):
        return stream
    module = module_of(device.type)
    beside = overlapped and device.type != "cpu"  # nobody who reads memory of the host waits for a copy into it
    if beside and hasattr(module, "Stream") and hasattr(module, "stream"):
        return _overlapped(stream, device, module)
    return map(functools.partial(send_to_device, device=device, non_blocking=beside), stream)


def _overlapped(stream: Iterator[Any], device: torch.device, module: Any) -> Iterator[Any]:
    """Copy one batch ahead; the computation's stream waits for the copy, not the host."""
    side, is_opaque = module.Stream(device), False

    def copied() -> Any:
        batch = next(stream, _END)
        if batch is _END:
            return _END
        if is_opaque:  # the copy may be given memory of an earlier batch, which queued work still reads
            side.wait_stream(module.current_stream(device))
        with module.stream(side):
            return send_to_device(batch, device, non_blocking=True), side.record_event()

    ahead = copied()
    while ahead is not _END:
        (batch, done), ahead = ahead, copied()
        # The copy ran on another stream than the batch is used on. The event orders the two; `record_stream` keeps the
        # memory from being given out again while the later one still reads it:
        # https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
        current = module.current_stream(device)
        current.wait_event(done)
        for leaf in tree_leaves(batch):
            if isinstance(leaf, torch.Tensor):
                leaf.record_stream(current)
            else:
                # A batch of a class of its own does not show the tensors that it moved.
                is_opaque |= hasattr(leaf, "to")
        yield batch
