"""Processes on XLA devices, through torch_xla. Never run on hardware: tests put a stand-in for torch_xla on gloo."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from accel_core.devices import xla
from accel_core.errors import CheckpointError, ConfigurationError, PreparationError
from accel_core.host.availability import imported
from accel_core.mesh.layout import Layout
from accel_core.optim.optimizer import Stepper
from accel_core.options.engines import engines
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.strategies import placement, recipe
from accel_core.strategies.bundle import Bundle
from accel_core.strategies.parts import Clip, Parts
from accel_parallel.averaging import Averaging
from accel_parallel.mesh.strategy import MeshStrategy
from accel_parallel.tensor.plan import TensorPlan


class XlaStrategy(MeshStrategy):
    """Every process holds the whole model; gradients are averaged at the end of a window.

    torch_xla records operations and runs them on request: here after each backward pass and each step. A model that the
    user wrapped in either version of torch_xla's own FSDP stays as it is: it synchronizes its gradients itself.
    """

    name = "xla"
    initializes = False
    combines: ClassVar[tuple[str, ...]] = ()

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        whole = dist.group.WORLD if self.world.size > 1 else None
        self.averaging = Averaging(self.world.device, [] if whole is None else [whole])

    @classmethod
    def lay_out(cls, rank: int, world_size: int, parallelism: ParallelismConfig | None, plugin: Any) -> Layout:
        """Let every process read its own part of the data; processes on XLA devices do not share a replica."""
        axes = [] if parallelism is None else parallelism.active_mesh_dims
        shared = [axis for axis in axes if axis != "dp_replicate"]
        if shared:
            raise ConfigurationError(
                f"Each process on an XLA device holds the whole model; got the axes {shared}. Set their sizes to 1, "
                "and wrap the model in torch_xla's own FSDP to shard it."
            )
        return super().lay_out(rank, world_size, parallelism, plugin)

    def check(self, bundle: Bundle) -> None:
        """Also refuse an optimizer beside a model that torch_xla shards, where it holds what the model lost."""
        for slot in bundle.models:
            if _is_sharded(slot.given):
                self._names.remember(slot.given)  # torch_xla replaced the parameters when it wrapped
        super().check(bundle)

    def plan(self, model: torch.nn.Module) -> TensorPlan:
        """Return that a model is not split; refuse one of which torch_xla would synchronize only a part's gradients."""
        inside = [name for name, part in model.named_modules() if name and _is_sharded(part)]
        if inside and not _is_sharded(recipe.inside(model)):
            raise PreparationError(
                f"torch_xla's FSDP has to wrap the root of a model; got {type(model).__name__}, sharded at "
                f"{inside[0]} only. Wrap the whole model too."
            )
        placement.refuse_sharded(model)
        return super().plan(model)

    def is_prepared(self, model: torch.nn.Module) -> bool:
        """Return whether there is nothing left to do: gradients are averaged, or torch_xla shards the model."""
        return _is_sharded(model) or super().is_prepared(model)

    def adopt(self, model: torch.nn.Module) -> None:
        """Take over a model that was prepared before; one that torch_xla shards stays as it is."""
        if _is_sharded(model):
            self._names.remember(model)
        else:
            super().adopt(model)

    def stepper(self, optimizer: torch.optim.Optimizer) -> Stepper | None:
        """Return `None`, and make the device run the recorded operations after each step."""
        found = super().stepper(optimizer)
        optimizer.register_step_post_hook(self._run_after_step)
        return found

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """Compute gradients, average them at the end of a window, and make the device run the recorded operations."""
        super().backward(loss, **kwargs)
        state = self.parts.accumulation.gradient_state
        state.is_xla_gradients_synced = state.sync_gradients
        xla.library().sync()

    def _run_after_step(self, *_: object) -> None:
        self.parts.accumulation.gradient_state.is_xla_gradients_synced = False
        xla.library().sync()

    def clip_grad_norm_(self, clip: Clip) -> torch.Tensor:
        """Scale gradients down to a common norm; through the model where torch_xla shards it over processes."""
        for model in map(recipe.inside, clip.models):
            own = getattr(model, "clip_grad_norm_", None)
            if _is_sharded(model) and callable(own) and _holds(model, clip.parameters):
                norm: torch.Tensor = own(clip.limit, clip.norm_type)
                return norm
        return super().clip_grad_norm_(clip)

    def state_dict(self, model: torch.nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole model's state; see `Strategy.state_dict`. Refuse one that torch_xla shards."""
        _refuse_pieces(model)
        return super().state_dict(model, unwrap=unwrap)

    def weights(self, model: torch.nn.Module) -> Iterable[tuple[str, Any]]:
        """Yield names and weights; see `Strategy.weights`. Refuse a model that torch_xla shards."""
        _refuse_pieces(model)
        return super().weights(model)


def _is_sharded(model: torch.nn.Module) -> bool:
    """Return whether torch_xla shards a model; its classes are looked up only where they were imported."""
    return any(isinstance(model, imported(wrapper) or ()) for wrapper in engines()["xla"].containers)


def _holds(model: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> bool:
    own = {id(parameter) for parameter in model.parameters()}
    return all(id(parameter) in own for parameter in parameters)


def _refuse_pieces(model: torch.nn.Module) -> None:
    """Refuse to save as whole what each process holds a piece of."""
    if _is_sharded(recipe.inside(model)):
        raise CheckpointError(
            f"A model that torch_xla shards has no whole state on any process; got {type(model).__name__}. Save each "
            "rank's own state with torch_xla, and join the files with its consolidate_sharded_ckpts."
        )
