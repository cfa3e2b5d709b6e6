"""What DeepSpeed's engine holds beside a model for stages 1 and 2 of ZeRO, laid out as the engine does it.

Each rank keeps a flat copy of its part of the weights, which the optimizer steps on. Gradients go through one bucket,
in which they are reduced, into the part of this rank. Stage 1 reduces when the backward pass is over; stage 2 whenever
the bucket is full, and drops the gradients of other ranks.
"""

import torch
from torch import nn

__all__ = ["ZeroEngine"]


class ZeroEngine:
    """The first rank's part of what stages 1 and 2 share.

    Args:
        model: The model.
        stage: 1 or 2.
        ranks: How many ranks share.
        bucket: The most elements that are reduced at once (`reduce_bucket_size`).

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
        self.master = nn.Parameter(self._trained[0].detach().new_empty(self._part))
        self.bucket: torch.Tensor | None = None
        self._waiting: list[nn.Parameter] = []
        self._partition: torch.Tensor | None = None

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce what is left after a backward pass, and give the optimizer the gradient of this rank's part."""
        if self._stage == 1:
            for parameter in self._trained:
                self._put(parameter)
        self._reduce()
        pieces = [self._share(parameter) for parameter in self._own if parameter.grad is not None]
        missing = self._part - sum(piece.numel() for piece in pieces)
        if missing > 0:
            pieces.append(self.master.new_zeros(missing))
        for parameter in self._trained:
            parameter.grad = None
        self.bucket, self._partition = None, None
        self.master.grad = torch.cat(pieces)

    def _share(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return what this rank has of a gradient, the last of which may belong to two ranks."""
        assert parameter.grad is not None
        return parameter.grad.flatten()[: self._part - self._begins[parameter]]

    def in_bucket(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient lies in the bucket.

        Args:
            gradient: The gradient.
        """
        bucket = self.bucket
        return bucket is not None and gradient.untyped_storage()._cdata == bucket.untyped_storage()._cdata

    def _made(self, parameter: nn.Parameter) -> None:
        """Take a gradient that the backward pass has made."""
        if self.bucket is None:
            self.bucket = self.master.detach().new_empty(self._size)
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
            self._partition = self.master.detach().new_empty(sum(each.numel() for each in self._own))
        assert parameter.grad is not None
        place = self._partition.narrow(0, self._begins[parameter], parameter.numel()).view_as(parameter)
        parameter.grad = place.copy_(parameter.grad)
