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

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from accel_core.mesh.spec import LayoutSpec
from accel_plan.live_bytes import LiveBytes

_GRADIENTS, _WEIGHTS = 2, 3
"""The stages from which on gradients and weights are shared."""

_STAY, _AHEAD = 1_000_000_000, 50_000_000
"""Elements that stage 3 keeps gathered, and those that it gathers at once: DeepSpeed's `stage3_max_live_parameters` and
`stage3_max_reuse_distance`, and its `stage3_prefetch_bucket_size`, by default."""


class ZeroShare:
    """The part of one rank: of the optimizer, of gradients from stage 2 on, and of weights at stage 3."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, spec: LayoutSpec, bucket: int, counter: LiveBytes
    ) -> None:
        parameters = list(model.parameters())
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._like, self._bucket, self._stage = self._trained[0].detach(), bucket, spec.zero_stage or 0
        self._part, self._counter = _part(self._trained, spec.ranks), counter
        self._sums: list[torch.Tensor] = []  # parts of the gradients, where the model has not all of them
        self._gathered = self._coming = 0  # elements of what stage 3 gathers, and of the buffer in which it comes
        self._reduced = False
        self._master = nn.Parameter(self._like.new_empty(self._part, dtype=torch.float32))
        counter.note([self._master], "optimizer")
        optimizer.param_groups[0]["params"] = [self._master]
        optimizer.register_step_pre_hook(self._before_step)
        if self._stage >= _GRADIENTS:
            for parameter in self._trained:
                parameter.register_post_accumulate_grad_hook(self._reduce)  # type: ignore[no-untyped-call]
        if self._stage == _WEIGHTS:
            counter.add(
                "weights", _part(parameters, spec.ranks) * self._like.itemsize - sum(p.nbytes for p in parameters)
            )
            if spec.ranks > 1:
                self._gathered, self._coming = gathered(model)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Have the bucket, and at stage 3 what is gathered, for a forward and backward pass."""
        self._reduced = self._stage == _WEIGHTS and bool(self._sums)  # stage 3 adds passes up in place
        self._counter.purpose = "communication"
        bucket = self._like.new_empty(self._bucket)
        self._counter.add("communication", self._gathered * bucket.itemsize)
        self._like.new_empty(self._coming)  # the first parameters are copied out of it, and it is gone
        yield
        self._counter.add("communication", -self._gathered * bucket.itemsize)
        del self._sums[1:]  # stage 2 adds what a pass left to what passes before it left

    def _reduce(self, parameter: torch.Tensor) -> None:
        """Let go of a gradient, which is reduced into this rank's part."""
        if not self._reduced:
            self._reduced = True
            self._sums.append(self._like.new_empty(self._part))
            self._counter.note(self._sums, "gradients")
        parameter.grad = None

    def _before_step(self, *_: object) -> None:
        """Step on this rank's part, with its gradients in 32 bits."""
        self._master.grad = torch.empty_like(self._master)
        self._counter.note([self._master.grad], "gradients")
        if self._stage < _WEIGHTS:  # what they are a copy of is there until then, or always
            self._sums.clear()
            for parameter in self._trained:
                parameter.grad = None


def gathered(model: nn.Module) -> tuple[int, int]:
    """Return how many elements stage 3 has gathered at once, and how many come at once, by DeepSpeed's defaults."""
    total = sum(parameter.numel() for parameter in model.parameters())
    largest = max(sum(each.numel() for each in module.parameters(recurse=False)) for module in model.modules())
    return min(max(_STAY, largest), total), min(max(_AHEAD, largest), total)


def _part(parameters: Iterable[torch.Tensor], ranks: int) -> int:
    return -(-sum(parameter.numel() for parameter in parameters) // ranks)
