"""What is read from a model while it trains: whole gradients and weights, and their digests."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from accel_core.accelerator import Accelerator
from accel_core.comm.tree import tree_leaves
from accel_core.mesh.tensor import local_part
from accel_core.modules.unwrap import canonical_name
from accel_verify.digests import digest


def _parameters(accelerator: Accelerator) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the parameter of all prepared models."""
    models = accelerator._models
    for number, model in enumerate(models):
        prefix = "" if len(models) == 1 else f"model {number}: "
        for name, parameter in accelerator.unwrap_model(model).named_parameters():
            yield prefix + canonical_name(name), parameter


def gradients(accelerator: Accelerator) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the whole gradient of each parameter that has one; every rank calls it."""
    for name, parameter in _parameters(accelerator):
        gradient = accelerator._runtime.strategy.whole_of(parameter, parameter.grad)
        if gradient is not None:
            yield name, gradient.detach().cpu()


def weights(accelerator: Accelerator) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the whole value of each parameter; every rank calls it."""
    for name, parameter in _parameters(accelerator):
        yield name, accelerator._runtime.strategy.whole_of(parameter, parameter).cpu()


def sketch(value: Tensor) -> tuple[float, str]:
    """Return the norm of a tensor and a digest of its bytes."""
    return float(torch.linalg.vector_norm(value.double())), digest(value)


def row_digests(batch: object) -> list[str]:
    """Return a digest of each row of a batch, over all its tensors."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    rows = len(tensors[0]) if tensors else 0
    tensors = [local_part(tensor.detach()).cpu() for tensor in tensors if len(tensor) == rows]
    return [digest([tensor[row] for tensor in tensors]) for row in range(rows)]


def first_tensor(output: object) -> Tensor | None:
    """Return this rank's part of the first floating point tensor in what a module returned; `None` without one."""
    # Other objects, such as a model's own output class, count as their attributes.
    leaves = (inner for leaf in tree_leaves(output) for inner in (leaf, *getattr(leaf, "__dict__", {}).values()))
    found = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
    return None if found is None else local_part(found.detach())


def sums(value: Tensor) -> tuple[int, float, float]:
    """Return the number of elements, their sum and the sum of their squares."""
    exact = value.double()
    return exact.numel(), float(exact.sum()), float(exact.square().sum())


def generator_state(device: torch.device) -> str:
    """Return a digest of the state of the default generator of a device."""
    state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return digest(state)
