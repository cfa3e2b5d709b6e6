"""Attention along a ring: keys and values go from rank to rank, and each holds those of one rank at a time.

torch has the algorithm, under names that are private until its interface settles. They are called here as torch's own
`context_parallel` calls them, with the kernel that it knows for accelerators, and with that of CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist

from accel_core import _torch
from accel_core.errors import EngineUnavailableError
from accel_core.host.versions import require_torch
from accel_parallel.context.attention import Attention, AttentionCall
from accel_parallel.context.order import Share

_SEQUENCE_DIM = 2
_READ_BACKWARD = ("grad_out", "query", "key", "value", "out", "logsumexp")
"""What backward kernels read, in their order; torch's ring passes it by these names."""


class RingAttention(Attention):
    """Attends causally, or to everything, while keys and values go round."""

    def __init__(self, group: dist.ProcessGroup, share: Share) -> None:
        require_torch("context_ring")
        super().__init__(group, share)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attention of this rank's queries over all keys."""
        query, key, value = call.query, call.key, call.value
        self._check_kernel(call)
        if call.enable_gqa:  # the kernels of a ring want as many heads of keys as of queries
            key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
        return cast(torch.Tensor, _Ring.apply(self.group, call.is_causal, call.scale, query, key, value))  # type: ignore[no-untyped-call]

    def _check_kernel(self, call: AttentionCall) -> None:
        """Refuse masks, dropout, layouts and numbers that the device's kernel does not take."""
        query, value, got = call.query, call.value, ""
        if call.mask is not None:
            got = "a mask"
        elif call.dropout_p:
            got = f"dropout_p={call.dropout_p}"
        elif query.dim() != 4 or query.shape[2:] != value.shape[2:]:
            got = f"queries of shape {tuple(query.shape)} and values of shape {tuple(value.shape)}"
        elif query.device.type != "cpu" and query.dtype not in (torch.float16, torch.bfloat16):
            got = f"{query.dtype} on {query.device.type}"
        if got:
            raise EngineUnavailableError(
                "Context parallel by cp_comm_strategy='alltoall' attends without mask or dropout, with queries, keys "
                "and values of one size in (batch, heads, tokens, size), in half precision where an accelerator "
                f"computes; got {got}. Use TorchContextParallelConfig(cp_comm_strategy='allgather')."
            )


class _Ring(torch.autograd.Function):
    """torch's ring, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        group: dist.ProcessGroup,
        is_causal: bool,
        scale: float | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        kernel, _ = _kernels(query.device.type)
        with _options(is_causal) as ring:
            out, sums, *rest = ring._templated_ring_attention(
                group, _SEQUENCE_DIM, kernel, query=query, key=key, value=value, is_causal=is_causal, scale=scale
            )
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.settings = group, is_causal, scale, rest
        return cast(torch.Tensor, out)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        group, is_causal, scale, rest = ctx.settings
        _, kernel = _kernels(query.device.type)
        with _options(is_causal) as ring:
            found = ring._templated_ring_attention_backward(
                group,
                _SEQUENCE_DIM,
                kernel,
                grad_out=gradients[0].contiguous(),  # what goes round is sent as it lies in memory
                grad_out_name="grad_out",
                query=query,
                key=key,
                value=value,
                out=out,
                logsumexp=sums,
                is_causal=is_causal,
                rest=rest,
                scale=scale,
            )
        return None, None, None, *found[:3]


@contextmanager
def _options(is_causal: bool) -> Iterator[Any]:
    """Let torch's ring send from rank to rank, in the order in which a causal mask is shared evenly, for one call."""
    ring = _torch.ring_attention()
    options = vars(ring._cp_options)  # settings of the process, so they hold for one call only
    before = options.copy()
    options.update(rotate_method=ring._RotateMethod.ALL_TO_ALL, enable_load_balance=is_causal)
    try:
        yield ring
    finally:
        options.update(before)


def _kernels(device: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the kernels of attention on a device, forward and backward, as a ring calls them."""
    aten = torch.ops.aten
    if device == "cpu":
        return _on_cpu, _on_cpu_backward
    return aten._scaled_dot_product_flash_attention, _on_accelerator_backward


def _on_cpu(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float | None) -> Any:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, 0.0, is_causal, scale=scale)


def _on_cpu_backward(*, is_causal: bool, rest: list[Any], scale: float | None, **tensors: torch.Tensor) -> Any:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(*(tensors[name] for name in _READ_BACKWARD), 0.0, is_causal, scale=scale)


def _on_accelerator_backward(*, is_causal: bool, rest: list[Any], scale: float | None, **tensors: torch.Tensor) -> Any:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
    lengths, seeds = rest[:4], rest[4:6]
    return kernel(*(tensors[name] for name in _READ_BACKWARD), *lengths, 0.0, is_causal, *seeds, scale=scale)
