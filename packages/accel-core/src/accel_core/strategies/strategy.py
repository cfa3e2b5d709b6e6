"""The seam between what users write and how it runs across processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accel_core._records import record
from accel_core.checkpoint.format import CheckpointFormat
from accel_core.checkpoint.plain import PLAIN
from accel_core.errors import PreparationError
from accel_core.modules.compilation import compile_regions, has_compiled_regions, is_compiled_module
from accel_core.modules.unwrap import canonical_state_dict, extract_model_from_parallel
from accel_core.options.enums import DistributedType, DynamoBackend
from accel_core.plugins.compilation import TorchDynamoPlugin
from accel_core.plugins.handlers import DistributedDataParallelKwargs
from accel_core.precision.precision import Precision
from accel_core.process.world import World
from accel_core.strategies.bundle import Bundle

__all__ = ["Parts", "Replica", "Strategy"]

_L = TypeVar("_L")


@record(frozen=True)
class Replica:
    """Which copy of the data-parallel model this process is part of.

    Attributes:
        rank: Number of the copy.
        size: Number of copies; each reads its own part of the data.
    """

    rank: int
    size: int


@record(frozen=True)
class Parts:
    """What a strategy is built from.

    Attributes:
        world: The processes.
        precision: The number format of forward passes.
        device_placement: Whether models are moved to the device.
        compilation: How models are compiled.
        ddp: Arguments of `DistributedDataParallel`.
        plugin: The strategy's own plugin, where it has one.
    """

    world: World
    precision: Precision
    device_placement: bool
    compilation: TorchDynamoPlugin
    ddp: DistributedDataParallelKwargs
    plugin: Any = None


class Strategy(ABC):
    """How models, optimizers and gradients live across processes.

    Called in this order: `check` and `prepare` for every `Accelerator.prepare`; per step `no_sync`, `backward`,
    `clip_grad_norm_`; `state_dict` and `format` when saving or loading.

    Args:
        parts: What the strategy is built from.
    """

    name: ClassVar[str]
    divides_loss: ClassVar[bool] = True
    """Whether the run divides a loss by the length of its accumulation window; an engine may do it itself."""

    format: ClassVar[CheckpointFormat] = PLAIN
    """How the strategy's state lies in a checkpoint."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.world = parts.world
        self.precision = parts.precision
        self._dead: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @abstractmethod
    def label(self) -> DistributedType:
        """Return what users see as `distributed_type`."""

    @abstractmethod
    def distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make a model on its device train together with those of the other processes."""

    @property
    def replica(self) -> Replica:
        """Which copy of the model this process is part of."""
        return Replica(self.world.rank, self.world.size)

    def check(self, bundle: Bundle) -> None:
        """Refuse objects that cannot train this way, before anything is changed.

        Raises:
            PreparationError: A model is spread over devices by a device map, or an optimizer holds parameters that
                an earlier preparation replaced.
        """
        for slot in bundle.models:
            _refuse_device_map(slot.given)
        for slot in bundle.optimizers:
            self._refuse_dead_parameters(slot.given)

    def prepare(self, bundle: Bundle) -> None:
        """Prepare the models of a bundle; fills their slots' results."""
        models, optimizers = self.precision.pair(
            [slot.given for slot in bundle.models], [slot.given for slot in bundle.optimizers]
        )
        for slot, optimizer in zip(bundle.optimizers, optimizers, strict=True):
            slot.given = optimizer
        for slot, model in zip(bundle.models, models, strict=True):
            slot.result = self.prepare_model(model, device_placement=slot.place)
        for slot in bundle.optimizers:
            self._refuse_dead_parameters(slot.given)

    def prepare_model(
        self, model: torch.nn.Module, *, device_placement: bool | None = None, evaluation: bool = False
    ) -> torch.nn.Module:
        """Prepare one model: convert layers, move, wrap the forward, distribute, compile.

        Args:
            model: The model.
            device_placement: Move it to the device; `None` leaves that to the run.
            evaluation: It is not trained, so it need not be distributed.

        Returns:
            The model, or what wraps it.
        """
        if isinstance(model, torch.nn.parallel.DistributedDataParallel) or is_compiled_module(model):
            return model
        place = self.parts.device_placement if device_placement is None else device_placement
        model = self.precision.convert(model)
        if place:
            self._move(model)
        model = self.precision.wrap(model)
        regional = self._compiles and bool(self.parts.compilation.use_regional_compilation)
        if regional and not has_compiled_regions(model):
            model = compile_regions(model, **self._compile_arguments())
        if not evaluation:
            model = self.distribute(model)
        if self._compiles and not regional:
            model = torch.compile(model, **self._compile_arguments())  # type: ignore[assignment]
        return model

    @property
    def _compiles(self) -> bool:
        return self.parts.compilation.backend != DynamoBackend.NO

    def _compile_arguments(self) -> dict[str, Any]:
        arguments = self.parts.compilation.to_kwargs()
        arguments.pop("use_regional_compilation", None)
        return arguments

    def _move(self, model: torch.nn.Module) -> None:
        """Move a model to the device, and remember parameters that torch replaced instead of moving."""
        if getattr(model, "hf_device_map", None):
            return
        before = dict(model.named_parameters())
        model.to(self.world.device)
        after = dict(model.named_parameters())
        for name, old in before.items():
            if after.get(name) is not old:
                self._dead[old] = name

    def _refuse_dead_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._dead:
            return
        held = [p for group in optimizer.param_groups for p in group["params"]]
        names = sorted({self._dead[p] for p in held if p in self._dead})
        if names:
            raise PreparationError(
                f"The optimizer {type(optimizer).__name__} holds parameters that moving the model replaced: "
                f"{', '.join(names[:8])}{' …' if len(names) > 8 else ''}; stepping it would train nothing. "
                "Make the optimizer from the prepared model's parameters."
            )

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients, scaled where the number format asks for it.

        Args:
            loss: A scalar, already divided for its accumulation window.
            **kwargs: Passed to `Tensor.backward`.
        """
        scaler = self.precision.scaler
        (loss if scaler is None else scaler.scale(loss)).backward(**kwargs)  # type: ignore[no-untyped-call]

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes of `model` leave gradients unsynchronised."""
        return nullcontext()

    def sync_next_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward pass synchronises although its forward ran under `no_sync`."""
        return nullcontext()

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context in which ranks with fewer batches shadow the collectives of those with more."""
        return nullcontext()

    def split_context(
        self,
        buffers: list[torch.Tensor] | None,
        buffer_seq_dims: list[int] | None,
        no_restore_buffers: set[torch.Tensor] | None,
    ) -> AbstractContextManager[None]:
        """Return a context that splits buffers along their sequence dims; without context parallel, it does nothing."""
        return nullcontext()

    def adapt_loader(self, loader: _L, model: Any) -> _L:
        """Adapt a loader to sequence parallel; without it, the loader is right as it is."""
        return loader

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients down to a common norm of `max_norm` at most; returns the norm before."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clip each gradient element to [-clip_value, clip_value]."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def unwrap(self, model: torch.nn.Module, *, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Return the model inside what `prepare_model` returned."""
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the whole model's state under the bare model's names, on every rank."""
        return canonical_state_dict(model)


def _refuse_device_map(model: torch.nn.Module) -> None:
    """Refuse to train a model whose weights a device map left on the disk or spread to be read only."""
    offloaded = sorted(
        {
            str(device)
            for module in model.modules()
            for device in (getattr(module, "hf_device_map", None) or {}).values()
            if str(device) == "disk"
        }
    )
    if offloaded:
        raise PreparationError(
            f"A model with weights on {', '.join(offloaded)} (its device map says so) cannot be trained: their updates "
            "would be lost. Load it without a device map, or with one that keeps every weight on a device."
        )
