"""A runtime whose run is trained by several replicas at once, of which some may die."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import IterableDataset

from accel_core._records import record
from accel_core.checkpoint import background, preemption
from accel_core.data.loader import PreparedLoader
from accel_core.data.samplers import BatchSamplerShard
from accel_core.errors import CheckpointError, ConfigurationError, EngineUnavailableError, PreparationError
from accel_core.host import environ
from accel_core.logging import get_logger
from accel_core.mesh.layout import Layout
from accel_core.mesh.tensor import local_memory
from accel_core.optim.optimizer import AcceleratedOptimizer
from accel_core.optim.scheduler import AcceleratedScheduler
from accel_core.process.world import lead
from accel_core.runtime import Runtime
from accel_torchft import state
from accel_torchft.division import Reader, ReplicaShard
from accel_torchft.kwargs import FaultToleranceKwargs
from accel_torchft.replicas import QuorumLost, Replicas
from accel_torchft.row import ENGINE
from accel_torchft.trackers import ReplicatedHub

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

__all__ = ["ReplicatedOptimizer", "ReplicatedRuntime"]

_logger = get_logger(__name__)
_LEFT = "A save is left to the replicas that went on without this one meanwhile: %s"
_STRATEGIES = ("single", "ddp", "fsdp2", "mesh")


class ReplicatedOptimizer(AcceleratedOptimizer):
    """An optimizer that steps where replicas agree on it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._updates_in_backward and self.gradient_state.meter is not None:
            raise PreparationError(
                "Replicas average gradients before an optimizer sees them; got a LOMO optimizer, which updates inside "
                "of backward. Use another one."
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step as `AcceleratedOptimizer` does, or not at all where the step is not made."""
        reader: Reader | None = self.gradient_state.meter
        if reader is None or not self.gradient_state.sync_gradients:
            return super().step(closure)
        if closure is not None:
            raise ConfigurationError(
                "Replicas decide once on a step; got a closure, with which an optimizer makes several. Use an "
                "optimizer without one."
            )
        if reader.commit():
            self._is_overflow = False
            return super().step()
        self._is_overflow = True
        if self.scaler is not None:
            self.scaler._per_optimizer_states.clear()  # else torch takes the gradients of the next step for unscaled
        return None


@record
class ReplicatedRuntime(Runtime):
    """A runtime that trains in step with other replicas."""

    optimizer_type = ReplicatedOptimizer

    def __post_init__(self) -> None:
        """Find the replica by its environment; without one, be a plain runtime.

        Raises:
            ConfigurationError: A setting with which replicas would part.
            EngineUnavailableError: An engine that replicas cannot train with.
            MissingDependencyError: torchft is not installed.
        """
        if environ.text("ACCEL_REPLICA") is None:
            return
        ENGINE.require()
        name, axes = self.strategy.name, self.strategy.layout.sizes
        split = [axis for axis, size in axes if size > 1 and axis in ("cp", "ep", *(["tp"] if name == "fsdp2" else []))]
        if name not in _STRATEGIES or split:
            raise EngineUnavailableError(
                f"Replicas train with whole models, FSDP2 or tensor parallel inside; got the engine {name!r}"
                f"{f' with the axes {split}' if split else ''}. Start the script without --replicas, or train with one "
                "of them."
            )
        if not self.gradient_state.sync_with_dataloader:
            raise ConfigurationError(
                "A step of replicas ends with the epoch; got sync_with_dataloader=False. Leave it out."
            )
        if self.gradient_state.meter is not None:
            raise ConfigurationError(
                "One Accelerator makes the steps of replicas; got a second one in this process. Use the first one."
            )
        settings = cast("FaultToleranceKwargs", self.handlers.get("FaultToleranceKwargs") or FaultToleranceKwargs())
        self.replicas = Replicas(settings, self.world, self._capture, self._restore, self._follow, self._speak)
        lead(self.replicas.number == 0 and self.replicas.life == 0)
        self.hub = ReplicatedHub(self.hub, self.replicas.notes, self.strategy.is_main, settings.timeout / 3)
        self.reader = self.gradient_state.meter = Reader(self, self._meet, self._parameters)

    @property
    def reading(self) -> Layout:
        """Which part of the data each rank reads, while all replicas are there."""
        if self.replicas is None:
            return super().reading
        own, sizes = self.strategy.reading, dict(self.strategy.reading.sizes)
        sizes["dp_replicate"] = sizes.get("dp_replicate", 1) * self.replicas.size
        return Layout.of(self.replicas.number * own.world_size + own.rank, self.replicas.size * own.world_size, sizes)

    def prepare_loader(
        self, loader: DataLoader[Any], placement: bool | None = None, slice_fn: Callable[..., Any] | None = None
    ) -> DataLoader[Any]:
        """Give each rank of each replica its part of a loader.

        Raises:
            PreparationError: The rest of an epoch of this loader cannot be divided anew.
        """
        if self.replicas is None or isinstance(loader, PreparedLoader):
            return super().prepare_loader(loader, placement, slice_fn)
        problem = (
            "an IterableDataset"
            if isinstance(loader.dataset, IterableDataset)
            else "dispatch_batches=True"
            if self.data.dispatch_batches or slice_fn is not None
            else "use_stateful_dataloader=True"
            if self.data.use_stateful_dataloader
            else ""
        )
        prepared = super().prepare_loader(loader, placement, slice_fn) if not problem else loader
        shard = prepared.shard if isinstance(prepared, PreparedLoader) else None
        if not problem and (shard is None or type(shard) is not BatchSamplerShard or shard.batch_size is None):
            self.dataloaders.remove(prepared)
            problem = "batches that have no fixed size, or are not divided by accel"
        if problem:
            raise PreparationError(
                f"Replicas divide the rest of an epoch anew when one dies; got a loader with {problem}. Use a dataset "
                "with a length in batches of one size, which each rank reads itself."
            )
        which = "sampler" if prepared.batch_sampler is None else "batch_sampler"
        prepared.__dict__[which] = ReplicaShard.of(cast("BatchSamplerShard", shard))
        return prepared

    def prepare_scheduler(self, scheduler: object) -> AcceleratedScheduler:
        """Wrap a schedule.

        Raises:
            ConfigurationError: It would move without a step.
        """
        if self.replicas is not None and not self.step_scheduler_with_optimizer:
            raise ConfigurationError(
                "A schedule moves with the steps that replicas make; got step_scheduler_with_optimizer=False. Leave it "
                "out; with split_batches=True a schedule moves once for each step."
            )
        return super().prepare_scheduler(scheduler)

    def keep_model(self, model: torch.nn.Module) -> None:
        """Register a prepared model; statistics of batches stay each replica's own.

        Raises:
            PreparationError: Weights are on the CPU, where NCCL does not average their gradients.
        """
        on_gpu = self.replicas is not None and self.world.device.type == "cuda"
        if on_gpu and any(local_memory(each).device.type == "cpu" for each in model.parameters()):
            raise PreparationError(
                "Replicas on GPUs average gradients by NCCL, which moves no tensors of the CPU; got weights of "
                f"{type(model).__name__} there. Leave out what offloads or keeps them there."
            )
        super().keep_model(model)
        norms = [name for name, each in model.named_modules() if isinstance(each, _BatchNorm)]
        if self.replicas is not None and norms:
            _logger.warning(
                "BatchNorm takes statistics of its own replica's batches: %s of %d replicas will differ. Use GroupNorm "
                "or LayerNorm where replicas have to be equal.",
                *(norms[0] if len(norms) == 1 else f"{len(norms)} layers", self.replicas.size),
            )

    def _meet(self, patient: bool) -> bool:
        """Begin a step with the other replicas; `patient` is one at the end of an epoch, which may be left alone.

        Raises:
            SystemExit: Too few replicas are there, with the code that asks for another start.
        """
        try:
            self.replicas.meet(ahead=not patient)
        except QuorumLost as lost:
            if patient:
                self.replicas.leave()
                return False
            self._end(lost)
        return True

    def _end(self, lost: QuorumLost) -> None:
        """Save what can be, and end the script."""
        named = self.project.automatic_checkpoint_naming
        if named and self.replicas.step and self.replicas.first_to(f"saved-at-{self.replicas.step}"):
            lead(True)
            super().save_state(None)
        saved = "" if named else "; nothing was saved, as checkpoints are not named automatically"
        _logger.error("Too few replicas for a step: %s%s. The script ends, to be started again.", lost, saved)
        self.replicas.leave()
        preemption.leave()

    def backward(self, loss: torch.Tensor, weight: torch.Tensor | float | None, arguments: dict[str, Any]) -> None:
        """Compute gradients, and average them over replicas where the step ends."""
        if self.replicas is None or self.reader.is_passing:
            super().backward(loss, weight, arguments)
            return
        reader = self.reader
        if not reader.is_open:
            raise ConfigurationError(
                "Replicas train with batches of a prepared loader; got a backward pass outside of one that is read "
                "while models train. Prepare the loader, and call model.train()."
            )
        if weight is not None:
            loss, weight = (loss, weight) if reader.share else (loss * 0, 0.0)
        elif reader.share != 1:
            loss = loss * reader.share
        ends = self.gradient_state.sync_gradients
        # With several ranks, shards, or weights of losses, gradients are whole only behind the pass.
        early = ends and weight is None and self.strategy.name == "single" and self.world.device.type == "cpu"
        if not early:
            super().backward(loss, weight, arguments)
        reader.is_fed = True
        if ends:
            amount = reader.weight if weight is None else self.accumulation.amount
            with self.replicas.averaging(self._parameters(), amount, reader.where, early=early):
                if early:
                    super().backward(loss, weight, arguments)

    def _parameters(self) -> list[torch.nn.Parameter]:
        found = {id(each): each for model in self.models for each in model.parameters()}
        for optimizer in self.optimizers:
            if any(id(each) not in found for group in optimizer.param_groups for each in group["params"]):
                raise PreparationError(
                    "Replicas average the gradients of prepared models; got an optimizer with a parameter of another "
                    "one. Pass all models to prepare()."
                )
        return list(found.values())

    def timed(self, part: str) -> AbstractContextManager[None]:
        """Warn of values that a script exchanges in a step: they come from this replica alone."""
        if self.replicas is not None and part == "exchange" and self.reader.is_open and self.replicas.size > 1:
            _logger.warning_once(
                "gather and reduce in a step reach the processes of one replica; the other replicas have other values."
            )
        return nullcontext()

    def save_state(self, output_dir: str | os.PathLike[str] | None, **arguments: Any) -> Path | background.Handle:
        """Save the state of the run, on the replica that speaks for it; the others go on.

        So does one without which the others went on while it saved: who saves for it clears away what it wrote.
        """
        if self.replicas is None or self.world.leads:
            try:
                return super().save_state(output_dir, **arguments)
            except CheckpointError as error:
                if self.replicas is None or not self.replicas.is_left_behind():
                    raise
                _logger.warning(_LEFT, error)
        project = self.project
        named = project.automatic_checkpoint_naming
        folder = project.checkpoints_folder() / f"checkpoint_{project.iteration}" if named else Path(output_dir or "")
        project.iteration += 1
        return folder if arguments.get("blocking", True) else background.start(lambda: None, folder)

    def _capture(self) -> dict[str, Any]:
        positions = {number: dict(position) for number, position in self.reader.positions.items()}
        return {"run": state.capture(self), "positions": positions, "history": self.replicas.history()}

    def _restore(self, found: dict[str, Any]) -> None:
        state.restore(self, found["run"])
        self.reader.positions.update(found["positions"])
        self.replicas.take_history(found["history"])

    def _speak(self, leads: bool) -> None:
        """Print, save and track for the run from now on, or leave that to another replica."""
        assert isinstance(self.hub, ReplicatedHub), "replicas have it from the start"
        if self.world.leads and not leads:
            try:
                background.finish()
            except CheckpointError as error:
                _logger.warning(_LEFT, error)
            self.hub.follow(False)  # while its trackers may still store what they have
        lead(leads)
        self.hub.follow(self.strategy.is_main)

    def _follow(self) -> None:
        """Let schedules move as far as samples were read, and trackers know who trains."""
        replicas = self.replicas
        for scheduler in self.schedulers:
            scheduler._replicas = len(replicas.living) * self.layout.replicas
        if replicas.has_changed:
            self.hub.log_at_last_step(
                {"replicas/living": len(replicas.living), "replicas/waited": replicas.waited}, replicas.step
            )
