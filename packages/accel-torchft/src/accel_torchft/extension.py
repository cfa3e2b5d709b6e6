"""A run that is trained by several replicas at once, of which some may die."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from accel_core.checkpoint import background, preemption
from accel_core.data.loader import PreparedLoader
from accel_core.data.samplers import BatchSamplerShard
from accel_core.errors import CheckpointError, ConfigurationError, EngineUnavailableError, PreparationError
from accel_core.extension import Extension
from accel_core.host import environ
from accel_core.logging import get_logger
from accel_core.mesh.layout import Layout
from accel_core.mesh.tensor import local_memory
from accel_core.optim.optimizer import AcceleratedOptimizer
from accel_core.process.world import lead, leading
from accel_core.runtime import Runtime
from accel_torchft import state
from accel_torchft.division import Reader, ReplicaShard
from accel_torchft.kwargs import FaultToleranceKwargs
from accel_torchft.replicas import QuorumLost, Replicas
from accel_torchft.row import ENGINE
from accel_torchft.trackers import ReplicatedHub

_logger = get_logger(__name__)
_LEFT = "A save is left to the replicas that went on without this one meanwhile: %s"
_STRATEGIES = ("single", "ddp", "fsdp2", "mesh")


class ReplicaExtension(Extension):
    """Lets a run train in step with other replicas; without the launcher's `--replicas` it does nothing.

    Raises:
        ConfigurationError: A setting with which replicas would part.
        EngineUnavailableError: An engine that replicas cannot train with.
        MissingDependencyError: torchft is not installed.
    """

    def __new__(cls, runtime: Runtime) -> Any:
        """Make one where the environment says which replica this is, and else one that leaves the run as it is."""
        return Extension(runtime) if environ.text("ACCEL_REPLICA") is None else super().__new__(cls)

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        ENGINE.require()
        strategy = runtime.strategy
        name, axes = strategy.name, strategy.layout.sizes
        split = [axis for axis, size in axes if size > 1 and axis in ("cp", "ep", *(["tp"] if name == "fsdp2" else []))]
        if name not in _STRATEGIES or split:
            raise EngineUnavailableError(
                f"Replicas train with whole models, FSDP2 or tensor parallel inside; got the engine {name!r}"
                f"{f' with the axes {split}' if split else ''}. Start the script without --replicas, or train with one "
                "of them."
            )
        if not runtime.gradient_state.sync_with_dataloader:
            raise ConfigurationError(
                "A step of replicas ends with the epoch; got sync_with_dataloader=False. Leave it out."
            )
        if not runtime.step_scheduler_with_optimizer:
            raise ConfigurationError(
                "A schedule moves with the steps that replicas make; got step_scheduler_with_optimizer=False. Leave it "
                "out; with split_batches=True a schedule moves once for each step."
            )
        if runtime.gradient_state.extensions:
            raise ConfigurationError(
                "One Accelerator makes the steps of replicas; got a second one in this process. Use the first one."
            )
        settings = cast("FaultToleranceKwargs", runtime.handlers.get("FaultToleranceKwargs") or FaultToleranceKwargs())
        self.replicas = Replicas(settings, runtime.world, self._capture, self._restore, self._follow, self._speak)
        lead(self.replicas.number == 0 and self.replicas.life == 0)
        self.hub = ReplicatedHub(runtime.hub, self.replicas.notes, strategy.is_main, settings.timeout / 3)
        self.reader = Reader(runtime, self.replicas, self._meet, self._parameters)
        runtime.replicas, runtime.hub = self.replicas, self.hub

    def reading(self, layout: Layout) -> Layout:
        """Return which part of the data each rank reads, while all replicas are there."""
        sizes = dict(layout.sizes)
        sizes["dp_replicate"] = sizes.get("dp_replicate", 1) * self.replicas.size
        rank = self.replicas.number * layout.world_size + layout.rank
        return Layout.of(rank, self.replicas.size * layout.world_size, sizes)

    def read(self, loader: PreparedLoader, batches: Iterator[Any]) -> Iterator[Any]:
        """Pass on the batches of this replica."""
        return self.reader.read(loader, batches)

    def keep_loader(self, loader: PreparedLoader) -> None:
        """Let a loader be divided anew.

        Raises:
            PreparationError: The rest of an epoch of it cannot be.
        """
        shard = loader.shard
        if type(shard) is not BatchSamplerShard or shard.batch_size is None or loader.use_stateful_dataloader:
            raise PreparationError(
                "Replicas divide the rest of an epoch anew when one dies; got a loader of "
                f"{type(loader.dataset).__name__} that cannot be. Use a dataset with a length in batches of one size, "
                "without dispatch_batches and use_stateful_dataloader."
            )
        which = "sampler" if loader.batch_sampler is None else "batch_sampler"
        loader.__dict__[which] = ReplicaShard.of(shard)

    def keep_model(self, model: torch.nn.Module) -> None:
        """Check a prepared model.

        Raises:
            PreparationError: Weights are on the CPU, where NCCL does not average their gradients.
        """
        on_gpu = self.runtime.world.device.type == "cuda"
        if on_gpu and any(local_memory(each).device.type == "cpu" for each in model.parameters()):
            raise PreparationError(
                "Replicas on GPUs average gradients by NCCL, which moves no tensors of the CPU; got weights of "
                f"{type(model).__name__} there. Leave out what offloads or keeps them there."
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
        named = self.runtime.project.automatic_checkpoint_naming
        if named and self.replicas.step and self.replicas.first_to(f"saved-at-{self.replicas.step}"):
            lead(True)
            self.runtime.save_state(None)
        saved = "" if named else "; nothing was saved, as checkpoints are not named automatically"
        _logger.error("Too few replicas for a step: %s%s. The script ends, to be started again.", lost, saved)
        self.replicas.leave()
        preemption.leave()

    def backward(self, run: Callable[..., None], loss: Tensor, weight: object, arguments: dict[str, Any]) -> None:
        """Compute gradients, and average them over replicas where the step ends."""
        runtime, reader = self.runtime, self.reader
        if reader.is_passing:
            run(loss, weight, arguments)
            return
        if not reader.is_open:
            raise ConfigurationError(
                "Replicas train with batches of a prepared loader; got a backward pass outside of one that is read "
                "while models train. Prepare the loader, and call model.train()."
            )
        if weight is not None:
            loss, weight = (loss, weight) if reader.share else (loss * 0, 0.0)
        elif reader.share != 1:
            loss = loss * reader.share
        ends = runtime.gradient_state.sync_gradients
        # With several ranks, shards, or weights of losses, gradients are whole only after the pass.
        early = ends and weight is None and runtime.strategy.name == "single" and runtime.world.device.type == "cpu"
        if not early:
            run(loss, weight, arguments)
        reader.is_fed = True
        if ends:
            amount = reader.weight if weight is None else runtime.accumulation.amount
            with self.replicas.averaging(self._parameters(), amount, reader.where, early=early):
                if early:
                    run(loss, weight, arguments)

    def step(self, run: Callable[..., object], optimizer: AcceleratedOptimizer, closure: object) -> object:
        """Step where replicas agree on it, or not at all."""
        if closure is not None:
            raise ConfigurationError(
                "Replicas decide once on a step; got a closure, with which an optimizer makes several. Use an "
                "optimizer without one."
            )
        optimizer._is_overflow = not self.reader.commit()
        if not optimizer._is_overflow:
            return run(None)
        if optimizer.scaler is not None:
            # Else torch takes the gradients of the next step for unscaled.
            optimizer.scaler._per_optimizer_states.clear()
        return None

    def _parameters(self) -> list[torch.nn.Parameter]:
        """Return what is averaged.

        Raises:
            PreparationError: An optimizer has other parameters, or updates before they are averaged.
        """
        found = {id(each): each for model in self.runtime.models for each in model.parameters()}
        for optimizer in self.runtime.optimizers:
            if optimizer._updates_in_backward:
                raise PreparationError(
                    "Replicas average gradients before an optimizer sees them; got a LOMO optimizer, which updates "
                    "inside of backward. Use another one."
                )
            if any(id(each) not in found for group in optimizer.param_groups for each in group["params"]):
                raise PreparationError(
                    "Replicas average the gradients of prepared models; got an optimizer with a parameter of another "
                    "one. Pass all models to prepare()."
                )
        return list(found.values())

    def timed(self, part: str) -> AbstractContextManager[object]:
        """Warn of values that a script exchanges in a step: they come from this replica alone."""
        if part == "exchange" and self.reader.is_open and self.replicas.size > 1:
            _logger.warning_once(
                "gather and reduce in a step reach the processes of one replica; the other replicas have other values."
            )
        return nullcontext()

    def save_state(self, run: Callable[..., Any], output_dir: str | os.PathLike[str] | None, **given: object) -> object:
        """Save the state of the run, on the replica that speaks for it; the others go on.

        So does one without which the others went on while it saved: who saves for it clears away what it wrote.
        """
        if leading():
            try:
                return run(output_dir, **given)
            except CheckpointError as error:
                if not self.replicas.is_left_behind():
                    raise
                _logger.warning(_LEFT, error)
        project = self.runtime.project
        named = project.automatic_checkpoint_naming
        folder = project.checkpoints_folder() / f"checkpoint_{project.iteration}" if named else Path(output_dir or "")
        project.iteration += 1
        return folder if given.get("blocking", True) else background.start(lambda: None, folder)

    def _capture(self) -> dict[str, Any]:
        positions = {number: dict(position) for number, position in self.reader.positions.items()}
        return {"run": state.capture(self.runtime), "positions": positions, "history": self.replicas.history()}

    def _restore(self, found: dict[str, Any]) -> None:
        state.restore(self.runtime, found["run"])
        self.reader.positions.update(found["positions"])
        self.replicas.take_history(found["history"])

    def _speak(self, leads: bool) -> None:
        """Print, save and track for the run from now on, or leave that to another replica."""
        if leading() and not leads:
            try:
                background.finish()
            except CheckpointError as error:
                _logger.warning(_LEFT, error)
            self.hub.follow(False)  # while its trackers may still store what they have
        lead(leads)
        self.hub.follow(self.runtime.strategy.is_main)

    def _follow(self) -> None:
        """Let schedules move as far as samples were read, and trackers know who trains."""
        replicas = self.replicas
        for scheduler in self.runtime.schedulers:
            scheduler._replicas = len(replicas.living) * self.runtime.layout.replicas
        if replicas.has_changed:
            self.hub.log_at_last_step(
                {"replicas/living": len(replicas.living), "replicas/waited": replicas.waited}, replicas.step
            )
