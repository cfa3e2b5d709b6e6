"""The gradients of a window, where the engine keeps them: whole on the parameters, or as this rank's parts.

DeepSpeed gives no public access to the parts before its step. Only this file reads an optimizer's internals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from accel_core._records import record
from accel_core._torch import foreach_mul_
from accel_core.errors import PreparationError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.base_optimizer import ZeROOptimizer

__all__ = ["KnownNorm", "add", "clear", "known", "norm_of", "parts_of", "scale", "using"]

_NO_STEP_YET = -1


def parts_of(engine: DeepSpeedEngine) -> list[torch.Tensor]:
    """Return the tensors that hold a window's complete gradients on this rank; refuse gradients on disk (nvme)."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups_gradients_flat"):  # BF16_Optimizer keeps 32-bit gradients in flat tensors
        return list(optimizer.fp32_groups_gradients_flat)
    if not hasattr(optimizer, "averaged_gradients"):
        return [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    if _is_offloaded(optimizer):
        return [group.grad for group, _ in _offloaded(optimizer) if group.grad is not None]
    parts = optimizer.averaged_gradients.values()
    return [part for group in parts if group is not None for part in group if part is not None]


def scale(engine: DeepSpeedEngine, factor: float | torch.Tensor) -> bool:
    """Multiply the complete gradients of a window."""
    parts = parts_of(engine)
    if parts:
        foreach_mul_(parts, factor)
    _note_norms(engine.optimizer)
    return bool(parts)


def norm_of(engine: DeepSpeedEngine) -> float:
    """Return the 2-norm of all gradients of an engine, the same on every rank; infinite if one is infinite or NaN."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "scaled_global_norm"):
        norms = [float(optimizer.scaled_global_norm())]
    elif hasattr(optimizer, "_get_norm_groups"):
        norms = [float(each) for each in optimizer._get_norm_groups()]
    else:
        norms = [float(torch.nn.utils.get_total_norm(parts_of(engine)))]
    # Arithmetic on one Python number: on a small model, tensor operations would cost more than the norm itself.
    is_valid = all(0 <= each < math.inf for each in norms)
    return math.hypot(*norms) / _loss_scale(engine) if is_valid else math.inf


@record(frozen=True)
class KnownNorm:
    """The 2-norm of an engine's gradients, and the gradients' versions when it was computed."""

    norm: float
    stand: tuple[tuple[int, int], ...]


def known(engine: DeepSpeedEngine, norm: float) -> KnownNorm | None:
    """Return a norm together with the current versions of the gradients; `None` if no step can reuse it."""
    if not math.isfinite(norm) or _taker(engine.optimizer) is None:  # an overflow has to be found again, by all ranks
        return None
    return KnownNorm(norm, _stand_of(engine))


def _taker(optimizer: ZeROOptimizer) -> str | None:
    """Return the name of the method by which a step computes the gradient norm, if the norm can be replaced."""
    name = next((name for name in ("scaled_global_norm", "_get_norm_groups") if hasattr(optimizer, name)), None)
    if name is None or optimizer.clip_grad > 0 or optimizer.dynamic_loss_scale:  # the step needs the norm itself
        return None
    # Muon's norm is not that of the gradients, and gradients on disk cannot be read.
    is_muon = "Muon" in type(optimizer.optimizer).__name__
    return None if is_muon or getattr(optimizer, "swap_optimizer", False) else name


def _stand_of(engine: DeepSpeedEngine) -> tuple[tuple[int, int], ...]:
    return tuple((id(part), part._version) for part in parts_of(engine))  # the version counts writes in place


@contextmanager
def using(engine: DeepSpeedEngine, found: KnownNorm | None) -> Iterator[None]:
    """Let a DeepSpeed step reuse the norm that clipping computed, if the gradients have not changed since.

    DeepSpeed would compute it again, with another collective, to decide whether to skip the step. Writes through
    `deepspeed.utils.safe_set_full_grad` go unnoticed: a NaN written in between reaches the weights, as in torch.
    """
    optimizer = engine.optimizer
    name = _taker(optimizer)
    if found is None or name is None or found.stand != _stand_of(engine):  # gradients were changed after clipping
        yield
        return
    norm = torch.tensor(found.norm * _loss_scale(engine), device=engine.device)
    setattr(optimizer, name, (lambda: norm) if name == "scaled_global_norm" else (lambda: [norm]))
    try:
        yield
    finally:
        delattr(optimizer, name)  # the instance attribute hid the method


def clear(engine: DeepSpeedEngine) -> None:
    """Drop the complete gradients of a window that no step has used."""
    optimizer = engine.optimizer
    optimizer.zero_grad()
    if not hasattr(optimizer, "averaged_gradients"):
        engine.zero_grad()
        return
    if hasattr(optimizer, "all_grad_tensors"):  # stages 1 and 2 start counting here
        optimizer.micro_step_id = _NO_STEP_YET
        for kept in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            kept.update(dict.fromkeys(kept))
    elif not _is_offloaded(optimizer):
        optimizer.averaged_gradients = {}
    if _is_offloaded(optimizer):
        optimizer.reset_cpu_buffers()  # gradients of offloaded parts add up in them
        for group, _ in _offloaded(optimizer):
            if group.grad is not None:
                group.grad.zero_()


def add(engine: DeepSpeedEngine, earlier: Iterable[torch.Tensor]) -> None:
    """Add the gradients of an earlier backward pass to those of the last one."""
    for part, before in zip(parts_of(engine), earlier, strict=True):
        part.add_(before)
    _note_norms(engine.optimizer)


def _loss_scale(engine: DeepSpeedEngine) -> float:
    scale = getattr(engine.optimizer, "loss_scale", 1.0)
    return float(getattr(engine.optimizer, "cur_scale", scale))


def _is_offloaded(optimizer: ZeROOptimizer) -> bool:
    return bool(getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False))


def _offloaded(optimizer: ZeROOptimizer) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each group of offloaded fp32 weights, with its parameters."""
    if getattr(optimizer, "swap_optimizer", False):
        raise PreparationError(
            "Gradients that DeepSpeed keeps on disk cannot be clipped or weighted by accel; got an optimizer that is "
            "offloaded to nvme. Set gradient_clipping in the configuration, and pass no weight to backward."
        )
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        yield from zip(optimizer.single_partition_of_fp32_groups, optimizer.params_in_partition, strict=True)
    else:
        yield from zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)


def _note_norms(optimizer: ZeROOptimizer) -> None:
    """Refresh the norms that DeepSpeed computed when it offloaded the gradients, and by which it clips."""
    if not (hasattr(optimizer, "norm_for_param_grads") and _is_offloaded(optimizer)):
        return
    norms: dict[Any, torch.Tensor] = {}
    for group, parameters in _offloaded(optimizer):
        if group.grad is not None and parameters:
            # One entry holds the whole group's norm: DeepSpeed adds up the squares of all.
            norms[optimizer.get_param_id(parameters[0])] = group.grad.double().norm()
    optimizer.norm_for_param_grads = norms
