"""The gradients of a window, where the engine keeps them: whole on the parameters, or as this rank's parts.

DeepSpeed gives no public access to the parts before its step. Only this file reads an optimizer's internals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from accel_core._torch import foreach_mul_
from accel_core.errors import PreparationError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_NO_STEP_YET = -1

_Group = tuple[torch.Tensor, list[torch.Tensor]]
"""Offloaded fp32 weights, and the parameters that lie in them."""


def gradients_of(engine: DeepSpeedEngine) -> Gradients:
    """Return the gradients of an engine, by its stage."""
    if type(engine.optimizer).__name__ == "BF16_Optimizer":
        return _Flat(engine)
    return (Gradients, _Split, _Split, _Sharded)[engine.zero_optimization_stage()](engine)


class Gradients:
    """Gradients that every rank has whole, on the parameters: those of stage 0."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        self.optimizer: Any = engine.optimizer

    def parts(self) -> list[torch.Tensor]:
        """Return the tensors that hold a window's complete gradients on this rank; refuse gradients on disk (nvme)."""
        return [parameter.grad for parameter in self.engine.module.parameters() if parameter.grad is not None]

    def norm(self) -> float:
        """Return the 2-norm of all gradients, the same on every rank; infinite if one is infinite or NaN."""
        # Arithmetic on one Python number: on a small model, tensor operations would cost more than the norm itself.
        norms = [float(each) for each in self._norms()]
        scale = getattr(self.optimizer, "cur_scale", getattr(self.optimizer, "loss_scale", 1.0))
        return math.hypot(*norms) / float(scale) if all(0 <= each < math.inf for each in norms) else math.inf

    def scale(self, factor: float | torch.Tensor) -> bool:
        """Multiply the gradients."""
        parts = self.parts()
        if parts:
            foreach_mul_(parts, factor)
        self._note_change()
        return bool(parts)

    def add(self, earlier: Iterable[torch.Tensor]) -> None:
        """Add the gradients of an earlier backward pass to those of the last one."""
        for part, before in zip(self.parts(), earlier, strict=True):
            part.add_(before)
        self._note_change()

    def clear(self) -> None:
        """Drop the gradients, which no step has used."""
        self.optimizer.zero_grad()
        self.engine.zero_grad()

    def step(self, *, norm_is_known: bool) -> None:
        """Let DeepSpeed update the parameters; where it can, it does not compute again a norm that is known."""
        self.engine.step()

    def _norms(self) -> Iterable[torch.Tensor]:
        return [torch.nn.utils.get_total_norm(self.parts())]

    def _note_change(self) -> None:
        """Let DeepSpeed know that gradients were changed."""


class _Flat(Gradients):
    """Gradients in 32 bits, in one tensor for each group: those of stage 1 in bf16 with `grad_accum_dtype` fp32."""

    def parts(self) -> list[torch.Tensor]:
        return list(self.optimizer.fp32_groups_gradients_flat)


class _Split(Gradients):
    """This rank's parts of gradients, on the device or offloaded: those of stages 1 and 2."""

    @property
    def is_offloaded(self) -> bool:
        return bool(self.optimizer.cpu_offload)

    def groups(self) -> list[_Group]:
        """Return each group of offloaded fp32 weights, with its parameters."""
        return list(
            zip(self.optimizer.single_partition_of_fp32_groups, self.optimizer.params_in_partition, strict=True)
        )

    def parts(self) -> list[torch.Tensor]:
        if self.is_offloaded:
            return [group.grad for group, _ in self.groups() if group.grad is not None]
        parts = self.optimizer.averaged_gradients.values()
        return [part for group in parts for part in group or () if part is not None]

    def clear(self) -> None:
        self.optimizer.zero_grad()
        self._restart()
        if self.is_offloaded:
            self.optimizer.reset_cpu_buffers()  # gradients of offloaded parts add up in them
            for part in self.parts():
                part.zero_()

    def step(self, *, norm_is_known: bool) -> None:
        # A switch of stages 1 and 2, for gradients on the device that DeepSpeed does not clip; stage 3 has none.
        spared = norm_is_known and not self.is_offloaded and not self.optimizer.clip_grad
        configured = self.engine.zero_compute_grad_norm()
        self.optimizer.compute_grad_norm = configured and not spared
        self.engine.step()
        self.optimizer.compute_grad_norm = configured  # a step of the script's own, or a load, looks at it

    def _restart(self) -> None:
        """Begin a window anew."""
        self.optimizer.micro_step_id = _NO_STEP_YET
        for kept in (self.optimizer.averaged_gradients, self.optimizer.all_grad_tensors):
            kept.update(dict.fromkeys(kept))

    def _norms(self) -> Iterable[torch.Tensor]:
        return [self.optimizer.scaled_global_norm()]

    def _note_change(self) -> None:
        """Refresh the norms that DeepSpeed computed when it offloaded the gradients, and by which it clips."""
        if self.is_offloaded:
            # One entry holds the whole group's norm: DeepSpeed adds up the squares of all.
            norms = self.optimizer.norm_for_param_grads
            norms.clear()
            norms |= {
                self.optimizer.get_param_id(parameters[0]): group.grad.double().norm()
                for group, parameters in self.groups()
                if group.grad is not None and parameters
            }


class _Sharded(_Split):
    """This rank's parts of gradients where parameters are in parts too: those of stage 3."""

    @property
    def is_offloaded(self) -> bool:
        return bool(self.optimizer.offload_optimizer)

    def groups(self) -> list[_Group]:
        if self.optimizer.swap_optimizer:
            raise PreparationError(
                "Gradients that DeepSpeed keeps on disk cannot be clipped or weighted by accel; got an optimizer that "
                "is offloaded to nvme. Set gradient_clipping in the configuration, and pass no weight to backward."
            )
        return list(zip(self.optimizer.fp32_partitioned_groups_flat, self.optimizer.fp16_groups, strict=True))

    def _restart(self) -> None:
        if not self.is_offloaded:
            self.optimizer.averaged_gradients = {}

    def _norms(self) -> Iterable[torch.Tensor]:
        norms: Iterable[torch.Tensor] = self.optimizer._get_norm_groups()
        return norms
