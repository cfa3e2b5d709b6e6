"""The average of gradients over replicas, in buckets; of whole models on CPUs it begins while a backward pass runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.distributed import Work
from torch.utils.hooks import RemovableHandle

from accel_core.errors import StateError
from accel_core.mesh.tensor import local_memory

_FREED = 31 << 20  # just below what glibc takes for large at most
_FIRST, _BUCKET = 1 << 20, 25 << 20  # bytes of gradients that are averaged at once, as of DDP


class Average:
    """Adds up gradients over replicas, each times its share; who has none for a parameter brings zeros.

    Behind the gradients of a bucket goes a number for each, which says how many replicas have it. All replicas send
    the same buckets in the same order, some of them earlier than others.

    Args:
        send: Begins to add up a tensor over replicas.
        arrived: Waits until that is done, and returns whether it was.
        share: Waits until it is known what this replica counts; `None` where the step is lost.
    """

    def __init__(
        self,
        send: Callable[[torch.Tensor], Work | None],
        arrived: Callable[[Work | None], bool],
        share: Callable[[], float | None],
    ) -> None:
        self._send_sum, self._arrived, self._share = send, arrived, share
        self.form = 0  # what replicas have to have alike
        self.is_early = True
        self.was_early = False  # a gradient changed after it was sent
        self._parameters: list[torch.nn.Parameter] = []
        self._hooks: list[RemovableHandle] = []
        self._buckets: list[list[int]] = []
        self._bucket_of: dict[int, int] = {}
        self._kept: dict[int, torch.Tensor] = {}
        self._waiting: list[set[int]] = []
        self._sent: list[tuple[Work | None, torch.Tensor]] = []
        self._is_armed = False

    def lay_out(self, parameters: Sequence[torch.nn.Parameter], early: bool) -> None:
        """Take the parameters of a step, of which `early` says that their gradients are whole when they are there."""
        found = [each for each in parameters if each.requires_grad or each.grad is not None]
        early = early and self.is_early
        self._waiting, self._sent = [], []
        if len(found) != len(self._parameters) or any(a is not b for a, b in zip(found, self._parameters, strict=True)):
            self._parameters, self._kept = found, {}
            if found and found[0].device.type == "cpu":
                # glibc returns blocks to the kernel that are larger than any that was freed, with pages that the next
                # step of gradients and optimizer would fetch anew.
                torch.empty(_FREED, dtype=torch.uint8)
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
            self._buckets = _buckets([local_memory(each) for each in found])
            self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket}
            text = " ".join(f"{each.numel()} {each.dtype}" for each in found)
            self.form = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
        if early and not self._hooks:
            self._hooks = [
                each.register_post_accumulate_grad_hook(partial(self._ready, index))  # type: ignore[no-untyped-call]
                for index, each in enumerate(found)
                if each.requires_grad
            ]
        self._waiting = [{*bucket} for bucket in self._buckets]
        self._is_armed, self.was_early = early, False

    def _ready(self, index: int, _: torch.Tensor) -> None:
        """Send what is whole; of reentrant checkpoints, a gradient comes in parts, and may have been sent too soon."""
        if not self._is_armed:
            return
        bucket = self._bucket_of[index]
        if bucket < len(self._sent):
            self.is_early, self.was_early = False, True
            return
        self._waiting[bucket].discard(index)
        while len(self._sent) < len(self._buckets) and not self._waiting[len(self._sent)]:
            if not self._send():
                return

    def _send(self) -> bool:
        """Send the next bucket; return whether the step is not lost."""
        share = self._share()
        if share is None:
            self._is_armed = False
            return False
        number = len(self._sent)
        parameters = [self._parameters[index] for index in self._buckets[number]]
        first, size = local_memory(parameters[0]), sum(local_memory(each).numel() + 1 for each in parameters)
        flat = self._kept.get(number)
        if flat is None:
            flat = torch.empty(size, dtype=first.dtype, device=first.device)
        if self._is_armed:
            self._kept[number] = flat
        parts, counts = _split(flat, parameters)
        with torch.no_grad():
            for part, parameter in zip(parts, parameters, strict=True):
                if parameter.grad is None or not share:  # what fills up a batch may be infinite
                    part.zero_()
                else:
                    torch.mul(_dense(parameter.grad), share, out=part)
            counts.copy_(torch.tensor([float(each.grad is not None) for each in parameters]))
        self._sent.append((self._send_sum(flat), flat))
        return True

    def finish(self) -> None:
        """Send what is left, and put what was averaged where the gradients are."""
        while len(self._sent) < len(self._buckets):
            if not self._send():
                break
        self._is_armed = False
        for (work, flat), bucket in zip(self._sent, self._buckets, strict=False):
            if not self._arrived(work):
                self._kept = {}  # what was sent after it may still be written to
                break
            self._take(flat, [self._parameters[index] for index in bucket])
        self._sent = []

    def stop(self) -> None:
        """Send no more in this step."""
        self._is_armed, self._sent, self._kept = False, [], {}

    def _take(self, flat: torch.Tensor, parameters: list[torch.nn.Parameter]) -> None:
        targets, sources = [], []
        parts, counts = _split(flat, parameters)
        for parameter, part, count in zip(parameters, parts, counts.tolist(), strict=True):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                targets.append(_dense(parameter.grad))
                sources.append(part)
        if targets:
            torch._foreach_copy_(targets, sources)


def _split(flat: torch.Tensor, parameters: list[torch.nn.Parameter]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the parts of a bucket, and the numbers behind them."""
    memories = [local_memory(each) for each in parameters]
    *parts, counts = torch.split(flat, [*(each.numel() for each in memories), len(memories)])
    return [part.view(each.shape) for part, each in zip(parts, memories, strict=True)], counts


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    memory = local_memory(gradient).detach()
    if memory.layout is not torch.strided:
        raise StateError(
            f"Replicas average dense gradients; got one with the layout {memory.layout}. Use sparse=False."
        )
    return memory


def _buckets(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Put tensors of one kind together, up to a size, from the last on, whose gradients are there first."""
    found: list[list[int]] = []
    sizes: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for index, tensor in reversed([*enumerate(tensors)]):
        kind = tensor.dtype, tensor.device
        bucket, left = sizes.get(kind, ([], 0))
        if left <= 0:
            bucket, left = [], _BUCKET if found else _FIRST
            found.append(bucket)
        bucket.append(index)
        sizes[kind] = bucket, left - tensor.numel() * tensor.element_size()
    return found
