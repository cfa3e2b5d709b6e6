"""The loss of a head that FSDP2 shards on its own: ranks gather slices of all shards, and never the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accel_core._torch import all_gather_single, reduce_scatter_single, run_gradient_hooks, shard_groups
from accel_core.mesh.tensor import local_memory, spread_over
from accel_core.modules.linear_loss import LEAST, SHARDED, add_product, is_plain, logits_of
from accel_parallel.fsdp2.in_place import gloo_reduces

_LEAST, _PART = 1024, 16  # rows of a slice, of all ranks together: at least so many, else the sixteenth of a shard

_How = tuple[int, float | None, int, torch.dtype]
"""The label that does not count, the soft cap, tokens at a time, and the number format of products."""


class _Slice(NamedTuple):
    first: int  # the row of every shard with which it begins
    rows: int  # how many it has of every shard
    weight: Tensor
    bias: Tensor | None
    missing: Tensor | None  # which rows are after the end of the vocabulary


def slice_heads(model: nn.Module, policy: Any) -> None:
    """Let losses of the linear layers that are sharded on their own be computed from slices of them."""
    for module in model.modules():
        own = dict(module.named_parameters())
        if isinstance(module, FSDPModule) and is_plain(module) and own.keys() <= {"weight", "bias"}:
            module.reshard()
            if all(isinstance(each, DTensor) and each.is_floating_point() for each in module.parameters()):
                setattr(module, SHARDED, _SlicedHead(module, policy))


class _SlicedHead:
    """Computes sums of losses.

    Every rank multiplies its own tokens with each slice and keeps a running maximum and sum; backward goes through the
    slices once more. How many there are depends on the shards alone, so ranks may have other numbers of tokens.
    """

    def __init__(self, head: nn.Module, policy: Any) -> None:
        self._take(head)
        (self._record,), mesh = shard_groups(head), self._weight.device_mesh
        (axis,) = (place for place, each in enumerate(self._weight.placements) if each.is_shard())
        self._group, self._ranks = mesh.get_group(axis), mesh.size(axis)
        self._copies = [mesh.get_group(each) for each in range(mesh.ndim) if each != axis]
        self._words, self._size = len(self._weight), -(-len(self._weight) // self._ranks)
        self._step = min(self._size, -(-max(_LEAST, self._size // _PART) // self._ranks))
        self._gathers: torch.dtype = (policy and policy.param_dtype) or self._weight.dtype
        self._reduces: torch.dtype = (policy and policy.reduce_dtype) or self._gathers

    def _take(self, head: Any) -> None:
        head.reshard()  # a pass without gradients may have left it whole
        self._weight, self._bias = head.weight, head.bias

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self, head: nn.Module, rows: Tensor, labels: Tensor, ignored: int, softcap: float | None, chunk: int | None
    ) -> Tensor:
        """Return the sum of the losses of this rank's tokens; every rank of the mesh calls it."""
        self._take(head)
        kind = rows.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self._gathers
        how = ignored, softcap, chunk or max(LEAST, rows.numel() // (self._step * self._ranks)), dtype
        total: Tensor = _Sliced.apply(rows, self._weight, self._bias, labels, self, how)  # type: ignore[no-untyped-call]
        return total

    @torch.no_grad()
    def measure(self, rows: Tensor, labels: Tensor, how: _How) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum of losses, and of each token the largest logit and the sum that makes probabilities."""
        ignored, _, chunk, dtype = how
        top = rows.new_full((len(rows),), -math.inf, dtype=torch.promote_types(dtype, torch.float32))
        sums, found = torch.zeros_like(top), torch.zeros_like(top)
        for one in self._slices(dtype):
            here, column = self._columns(labels, ignored, one)
            for own in _parts(rows, chunk):
                logits, _ = _logits(rows[own], one, how)
                found[own] += logits.gather(-1, column[own, None])[:, 0] * here[own]
                before, top[own] = top[own].clone(), torch.maximum(top[own], logits.amax(-1))
                sums[own] *= (before - top[own]).exp_()
                sums[own] += logits.sub_(top[own, None]).exp_().sum(-1)
                del logits  # or the next ones would be made while these exist
        return ((sums.log() + (top - found)) * (labels != ignored)).sum(), top, sums

    @torch.no_grad()
    def learn(self, saved: tuple[Tensor, ...], how: _How, gradient: Tensor, needed: bool) -> Tensor | None:
        """Add the mean gradient over ranks to the shards' own; return that of this rank's hidden states, if needed."""
        (rows, labels, top, sums), (ignored, _, chunk, dtype) = saved, how
        weight, bias = self._weight, self._bias
        if self._record._post_reduce_event is not None:  # of a plain pass of the head, whose stream adds gradients too
            self._record.device_handle.current_stream().wait_event(self._record._post_reduce_event)
        scales = (labels != ignored) * gradient
        towards = torch.zeros_like(rows, dtype=top.dtype) if needed else None
        for one in self._slices(dtype):
            here, column = self._columns(labels, ignored, one)
            learned = torch.zeros_like(one.weight, dtype=top.dtype) if weight.requires_grad else None
            of_bias = top.new_zeros(len(one.weight)) if bias is not None and bias.requires_grad else None
            for own in _parts(rows, chunk):
                with torch.enable_grad():  # by which a counter of FLOPs knows what is computed again
                    logits, slope = _logits(rows[own], one, how)
                logits.sub_(top[own, None]).exp_().mul_((scales[own] / sums[own])[:, None])
                logits.scatter_add_(-1, column[own, None], -(here[own] * scales[own])[:, None])
                slopes = (logits if slope is None else logits.mul_(slope)).to(dtype)
                if towards is not None:
                    add_product(towards[own], slopes, one.weight)
                if learned is not None:
                    add_product(learned, slopes.T, rows[own].to(dtype))
                if of_bias is not None:
                    of_bias += slopes.sum(0)
                del logits, slopes, slope
            for parameter, gradients in ((weight, learned), (bias, of_bias)):
                if gradients is not None:
                    self._reduce(parameter, gradients, one.first)
        for each in (weight, bias):
            if each is not None and each.requires_grad:
                run_gradient_hooks(each)
        return None if towards is None else towards.to(rows.dtype)

    def _slices(self, dtype: torch.dtype) -> Iterator[_Slice]:
        """Yield slices in turn, each gathered while the one before is computed with."""
        parameters = [each for each in (self._weight, self._bias) if each is not None]
        coming = [self._gather(each, 0) for each in parameters]
        for first in range(0, self._size, self._step):
            for _, work in coming:
                work.wait()
            weight, *biases = (gathered.to(dtype) for gathered, _ in coming)
            end = first + len(weight) // self._ranks
            coming = [self._gather(each, end) for each in parameters if end < self._size]
            missing = None
            if self._words < self._size * self._ranks:
                places = torch.arange(self._size * self._ranks, device=weight.device).view(self._ranks, -1)
                missing = places[:, first:end].flatten() >= self._words
            yield _Slice(first, end - first, weight, biases[0] if biases else None, missing)

    def _gather(self, parameter: Tensor, first: int) -> tuple[Tensor, dist.Work]:
        """Begin to gather a slice of all shards, in the number format in which FSDP gathers."""
        rows = min(self._step, self._size - first)
        own = local_memory(parameter)[first : first + rows].to(self._gathers)
        if len(own) < rows:  # the last shards are shorter
            own = torch.cat([own, own.new_zeros(rows - len(own), *own.shape[1:])])
        gathered = own.new_empty(self._ranks * rows, *own.shape[1:])
        work: dist.Work = all_gather_single(gathered, own, group=self._group, async_op=True)
        if gloo_reduces(own.device):  # in torch 2.13 its threads write what ended last into one text, without a lock
            work.wait()
        return gathered, work

    def _columns(self, labels: Tensor, ignored: int, one: _Slice) -> tuple[Tensor, Tensor]:
        """Return whether the row that a label names is in a slice, and where."""
        place = labels % self._size - one.first
        here = (labels != ignored) & (labels >= 0) & (labels < self._words) & (place >= 0) & (place < one.rows)
        return here, torch.where(here, labels // self._size * one.rows + place, 0)

    def _reduce(self, parameter: Tensor, learned: Tensor, first: int) -> None:
        """Add the mean over ranks of a slice's gradient to the gradient of this rank's shard, as FSDP does."""
        count = math.prod(group.size() for group in (self._group, *self._copies))
        learned = learned.div_(getattr(self._record, "gradient_divide_factor", None) or count).to(self._reduces)
        own = learned.new_empty(len(learned) // self._ranks, *learned.shape[1:])
        reduce_scatter_single(own, learned, group=self._group)
        for group in self._copies:
            dist.all_reduce(own, group=group)
        if parameter.grad is None:
            parameter.grad = spread_over(torch.zeros_like(local_memory(parameter)), parameter)
        held = local_memory(parameter.grad)[first : first + len(own)]
        held += own[: len(held)]


class _Sliced(torch.autograd.Function):
    """The sum of losses; gradients of the head go where those of its shards are, as FSDP's do."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: _SlicedHead, how: _How
    ) -> Tensor:
        """Return the sum."""
        with torch.autocast(rows.device.type, enabled=False):
            total, top, sums = head.measure(rows, labels, how)
        ctx.save_for_backward(rows, labels, top, sums)
        ctx.head, ctx.how = head, how
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the hidden states."""
        with torch.autocast(gradient.device.type, enabled=False):
            towards = ctx.head.learn(ctx.saved_tensors, ctx.how, gradient, ctx.needs_input_grad[0])
        return towards, None, None, None, None, None


def _parts(rows: Tensor, size: int) -> list[slice]:
    return [slice(first, first + size) for first in range(0, len(rows), size)]


def _logits(rows: Tensor, one: _Slice, how: _How) -> tuple[Tensor, Tensor | None]:
    logits, slope = logits_of(rows.to(one.weight.dtype), one.weight, one.bias, how[1])
    return logits if one.missing is None else logits.masked_fill_(one.missing, -math.inf), slope
