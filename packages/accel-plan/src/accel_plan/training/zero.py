"""What DeepSpeed's engine holds beside a model for stages 1 and 2 of ZeRO, laid out as the engine does it.

Each rank keeps a flat copy of its part of the weights in 32 bits, which the optimizer steps on. Gradients have the
dtype of the weights. They go through one bucket, in which they are reduced, into the part of this rank. Stage 1 adds
them up on the parameters, and reduces after the last backward pass of a step. Stage 2 reduces in each pass, whenever
the bucket is full, drops the gradients of other ranks, and adds up the parts of this rank.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

__all__ = ["ZeroEngine"]


class ZeroEngine:
    """The first rank's part of what stages 1 and 2 share.

    Attributes:
        master: The copy of this rank's part of the weights.
        bucket: What gradients are reduced in; `None` between backward passes.
    """

    def __init__(self, model: nn.Module, stage: int, ranks: int, bucket: int) -> None:
        self._stage, self._size = stage, bucket
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        total = sum(parameter.numel() for parameter in self._trained)
        self._part = -(-total // (2 * ranks)) * 2
        self._begins: dict[nn.Parameter, int] = {}
        begin = 0
        for parameter in self._trained:
            self._begins[parameter] = begin
            begin += parameter.numel()
            parameter.register_post_accumulate_grad_hook(self._made)  # type: ignore[no-untyped-call]
        self._own = [parameter for parameter in self._trained if self._begins[parameter] < self._part]
        self.master = nn.Parameter(self._trained[0].detach().new_empty(self._part, dtype=torch.float32))
        self.bucket: torch.Tensor | None = None
        self._waiting: list[nn.Parameter] = []
        self._partition: torch.Tensor | None = None
        self._sums: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def end_pass(self, last: bool) -> None:
        """Reduce what a backward pass left, and add it to what passes before it left."""
        if self._stage == 1 and not last:
            return
        if self._stage == 1:
            for parameter in self._trained:
                self._put(parameter)
        self._reduce()
        for parameter in self._own:
            if parameter.grad is None:
                continue
            total = self._sums.setdefault(self._begins[parameter], parameter.grad)
            if total is not parameter.grad:
                total.add_(parameter.grad)
        for parameter in self._trained:
            parameter.grad = None
        self.bucket, self._partition = None, None

    @torch.no_grad()
    def finish(self) -> None:
        """Give the optimizer the sum of the gradients of this rank's part, in 32 bits."""
        pieces = [total.flatten()[: self._part - begin] for begin, total in self._sums.items()]
        missing = self._part - sum(piece.numel() for piece in pieces)
        if missing > 0:
            pieces.append(self._trained[0].new_zeros(missing))
        self.master.grad = torch.cat(pieces).to(self.master.dtype)
        self._sums = {}

    @property
    def masters(self) -> list[nn.Parameter]:
        """What the optimizer steps on."""
        return [self.master]

    @property
    def held(self) -> dict[str, list[torch.Tensor]]:
        """What this rank has between steps beside the model, by what it is for."""
        return {"optimizer": [self.master]}

    def passing(self) -> AbstractContextManager[None]:
        """Return the context of a forward and backward pass."""
        return nullcontext()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step on this rank's part."""
        optimizer.step()

    @property
    def sums(self) -> list[torch.Tensor]:
        """The gradients of this rank's part that backward passes have left."""
        return list(self._sums.values())

    def in_bucket(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient lies in the bucket."""
        bucket = self.bucket
        return bucket is not None and gradient.untyped_storage()._cdata == bucket.untyped_storage()._cdata

    def _made(self, parameter: nn.Parameter) -> None:
        """Take a gradient that the backward pass has made."""
        if self.bucket is None:
            self.bucket = parameter.detach().new_empty(self._size)
        if self._stage == 2:
            with torch.no_grad():
                self._put(parameter)

    def _put(self, parameter: nn.Parameter) -> None:
        """Move a gradient into the bucket, which is reduced first where it is full."""
        if parameter.grad is None or self.bucket is None:
            return
        used = sum(each.numel() for each in self._waiting)
        if used + parameter.numel() > self._size:
            self._reduce()
            used = 0
        if parameter.numel() <= self._size:  # a larger one is reduced where it is
            place = self.bucket.narrow(0, used, parameter.numel()).view_as(parameter)
            parameter.grad = place.copy_(parameter.grad)
        self._waiting.append(parameter)

    def _reduce(self) -> None:
        """Reduce the bucket; keep what belongs to this rank."""
        if len({part for parameter in self._waiting for part in self._parts(parameter)}) > 1:
            # Slices of several ranks are reduced in a copy.
            torch.cat([parameter.grad.flatten() for parameter in self._waiting if parameter.grad is not None])
        for parameter in self._waiting:
            if self._begins[parameter] < self._part:
                self._keep(parameter)
            elif self._stage == 2:
                parameter.grad = None
        self._waiting = []

    def _parts(self, parameter: nn.Parameter) -> range:
        begin = self._begins[parameter]
        return range(begin // self._part, (begin + parameter.numel() - 1) // self._part + 1)

    def _keep(self, parameter: nn.Parameter) -> None:
        if self._partition is None:
            self._partition = parameter.detach().new_empty(sum(each.numel() for each in self._own))
        assert parameter.grad is not None
        place = self._partition.narrow(0, self._begins[parameter], parameter.numel()).view_as(parameter)
        parameter.grad = place.copy_(parameter.grad)
