"""What DeepSpeed's engine holds on a rank beside the model, by the formulas of ZeRO.

Of P parameters on N ranks, in elements:

| stage | weights | gradients | in 32 bits |
|---|---|---|---|
| 1 | P | P | P / N each of a copy of weights, of each state of the optimizer, and of gradients while it steps |
| 2 | P | P / N | the same |
| 3 | P / N, and the gathered ones | P / N | the same |

The table is that of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020),
section 5. DeepSpeed's own estimates (`estimate_zero2_model_states_mem_needs` in `deepspeed.runtime.zero.stage_1_and_2`
and `estimate_zero3_model_states_mem_needs` in `stage3`) have the same numbers for Adam and 16 bits, and add the
gradients in 32 bits. What else the engine allocates is not counted, but for its bucket and what stage 3 gathers.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from accel_plan.live_bytes import LiveBytes

__all__ = ["ZeroShare"]

_GRADIENTS, _WEIGHTS = 2, 3
"""The stages from which on gradients and weights are shared."""

_STAY, _AHEAD = 1_000_000_000, 50_000_000
"""Elements that stage 3 keeps gathered, and those that it gathers at once: DeepSpeed's `stage3_max_live_parameters` and
`stage3_max_reuse_distance`, and its `stage3_prefetch_bucket_size`, by default."""


class ZeroShare:
    """The part of one rank.

    Attributes:
        master: The copy of this rank's weights on which the optimizer steps.
        held: What this rank has between steps beside the model, by what it is for.
        sums: Its part of the gradients, where the model has not all of them.
    """

    def __init__(self, model: nn.Module, stage: int, ranks: int, bucket: int) -> None:
        self._parameters = list(model.parameters())
        self._shapes = [parameter.shape for parameter in self._parameters]
        self._trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        self._like, self._bucket, self._stage = self._trained[0].detach(), bucket, stage
        self._part, self._reduced = _part(self._trained, ranks), False
        self.master = nn.Parameter(self._like.new_empty(self._part, dtype=torch.float32))
        self.held: dict[str, list[torch.Tensor]] = {"optimizer": [self.master]}
        self.sums: list[torch.Tensor] = []
        if stage >= _GRADIENTS:
            for parameter in self._trained:
                parameter.register_post_accumulate_grad_hook(self._reduce)  # type: ignore[no-untyped-call]
        self._excess = 0  # bytes that the model has in a pass, and a rank has not
        self._coming = 0  # elements of the buffer in which parameters come
        if stage == _WEIGHTS:
            self.held["weights"] = [self._like.new_empty(_part(self._parameters, ranks))]
            here, self._coming = gathered(model) if ranks > 1 else (0, 0)
            self._excess = sum(each.nbytes for each in self._parameters) - here * self._like.itemsize
            self._empty()

    @contextmanager
    def passing(self, counter: LiveBytes) -> Iterator[None]:
        """Have the bucket, and at stage 3 what is gathered, for a forward and backward pass."""
        self._reduced = self._stage == _WEIGHTS and bool(self.sums)  # stage 3 adds passes up in place
        counter.purpose = "communication"
        counter.add("communication", -self._excess)
        traveling = [self._like.new_empty(self._bucket)]
        if self._stage == _WEIGHTS:
            for parameter, shape in zip(self._parameters, self._shapes, strict=True):
                parameter.data = parameter.new_empty(shape)
            traveling += self._parameters
        counter.note(traveling, "communication")
        self._like.new_empty(self._coming)  # the first parameters are copied out of it, and it is gone
        yield
        del self.sums[1:]  # stage 2 adds what a pass left to what passes before it left
        if self._stage == _WEIGHTS:
            self._empty()
        counter.add("communication", self._excess)

    def _reduce(self, parameter: torch.Tensor) -> None:
        """Let go of a gradient, which is reduced into this rank's part."""
        if not self._reduced:
            self._reduced = True
            self.sums.append(self._like.new_empty(self._part))
        parameter.grad = None

    def _empty(self) -> None:
        """Let parameters of which a rank has a part have no elements of their own."""
        for parameter in self._parameters:
            parameter.data = parameter.new_empty(0)

    def step(self, optimizer: torch.optim.Optimizer, note: Callable[[Iterable[torch.Tensor], str], None]) -> None:
        """Step on this rank's part, with its gradients in 32 bits."""
        self.master.grad = torch.empty_like(self.master)
        note([self.master.grad], "gradients")
        if self._stage < _WEIGHTS:  # what they are a copy of is there until then, or always
            self.sums.clear()
            for parameter in self._trained:
                parameter.grad = None
        optimizer.param_groups[0]["params"] = [self.master]
        optimizer.step()
        self.master.grad = None


def gathered(model: nn.Module) -> tuple[int, int]:
    """Return how many elements stage 3 has gathered at once, and how many come at once, by DeepSpeed's defaults."""
    total = sum(parameter.numel() for parameter in model.parameters())
    largest = max(sum(each.numel() for each in module.parameters(recurse=False)) for module in model.modules())
    return min(max(_STAY, largest), total), min(max(_AHEAD, largest), total)


def _part(parameters: Iterable[torch.Tensor], ranks: int) -> int:
    return -(-sum(parameter.numel() for parameter in parameters) // ranks)
