"""Context parallel as a strategy uses it: one object for a run whose ranks share sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist

from accel_core.comm.tree import tree_leaves
from accel_core.errors import DataError, StateError
from accel_core.plugins.parallelism import TorchContextParallelConfig
from accel_core.strategies.parts import Parts, SequenceBuffers
from accel_parallel.context.attention import Attention, GatheredAttention
from accel_parallel.context.buffers import check_buffers, split_in_place
from accel_parallel.context.interception import attending, refusing_recomputation, uncompiled
from accel_parallel.context.metrics import of_whole_samples
from accel_parallel.context.models import CompleteInputs, check_attention, find_model
from accel_parallel.context.order import Share
from accel_parallel.context.ring import RingAttention

_T = TypeVar("_T")


class ContextParallel:
    """Ranks that share each sequence of a batch."""

    def __init__(self, group: dist.ProcessGroup, settings: TorchContextParallelConfig) -> None:
        self.group = group
        self._kind = RingAttention if settings.cp_comm_strategy == "alltoall" else GatheredAttention
        self._attention: Attention | None = None
        self._left_open = False
        self._watched: WeakSet[torch.nn.Module] = WeakSet()  # prepare may see a model twice

    @classmethod
    def of(cls, parts: Parts) -> ContextParallel | None:
        """Return what splits the sequences of a run; `None` where each rank has whole ones."""
        if parts.layout.size("cp") == 1 or parts.mesh is None or parts.parallelism is None:
            return None
        return cls(parts.mesh.get_group("cp"), parts.parallelism.cp_handler or TorchContextParallelConfig())

    @property
    def share(self) -> Share | None:
        """This rank's part of the sequence while a block is open; `None` outside."""
        return None if self._attention is None else self._attention.share

    def check(self, model: torch.nn.Module) -> None:
        """Refuse a model whose configuration names an attention that would not go over all ranks."""
        check_attention(model)

    def watch(self, model: torch.nn.Module, *, compiled: bool = False) -> None:
        """Complete what a model gets in a block, if it is one of transformers."""
        module = find_model(model)
        if module is None or module in self._watched:
            return
        self._watched.add(module)
        hook = CompleteInputs(self.group, lambda: self.share, compiled)
        module.register_forward_pre_hook(uncompiled(hook) if compiled else hook, with_kwargs=True)

    @contextmanager
    def split(self, given: SequenceBuffers) -> Iterator[None]:
        """Split tensors in the block, in which attention goes over all ranks; no other may be open."""
        if self._attention is not None:
            raise StateError(
                "A sequence is split once; got a context-parallel block inside another. Leave the first before the "
                "next begins."
            )
        share = check_buffers(given, self.group.rank(), self.group.size())
        attention = self._kind(self.group, share)
        with split_in_place(given, share):
            self._attention, self._left_open = attention, True  # stays open until backward was called in a block
            try:
                with attending(attention):
                    yield
            finally:
                self._attention = None

    def whole_metrics(self, value: _T) -> _T:
        """Return values as those of whole samples; see `metrics.of_whole_samples`.

        Raises:
            DataError: They have this rank's part of a sequence, in a block, or differ among ranks that share one: one
                rank's part would count for all.
        """
        share = self.share
        for leaf in () if share is None else tree_leaves(value):
            if share is not None and isinstance(leaf, torch.Tensor) and share.local_length in leaf.shape[1:]:
                raise DataError(
                    "Metrics count whole samples; got a tensor of shape "
                    f"{tuple(leaf.shape)} in a context-parallel block, where a rank has {share.local_length} tokens of "
                    "each sequence. Reduce it to numbers first, or use gather."
                )
        return of_whole_samples(value, self.group)

    def around_backward(self) -> AbstractContextManager[object]:
        """Return the context of a backward pass, which belongs into the block of its forward pass."""
        if self._attention is not None:
            self._left_open = False
            return nullcontext()
        # What was computed in a block may be computed again, by activation checkpointing, where no block is open.
        return refusing_recomputation() if self._left_open else nullcontext()
