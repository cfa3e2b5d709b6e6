"""What a strategy is given: the facts of a run, and the verbs that prepare what it does not own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from accel_core._records import record
from accel_core.errors import EngineUnavailableError
from accel_core.mesh.layout import Layout
from accel_core.optim.accumulation import Accumulation
from accel_core.optim.optimizer import AcceleratedOptimizer
from accel_core.optim.scheduler import AcceleratedScheduler
from accel_core.options.enums import PRECISIONS
from accel_core.plugins.compilation import TorchDynamoPlugin
from accel_core.plugins.handlers import AutocastKwargs, GradScalerKwargs, KwargsHandler, in_use
from accel_core.plugins.loading import DataLoaderConfiguration
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.precision import registry as precisions
from accel_core.precision.precision import Precision
from accel_core.process.world import World

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import DataLoader


class Clip(NamedTuple):
    """Gradients to clip.

    Attributes:
        parameters: The parameters that have them.
        limit: The largest norm, or the largest absolute value of an element.
        norm_type: The p of the p-norm.
        models: The prepared models, for engines that clip through them.
    """

    parameters: list[torch.Tensor]
    limit: float
    norm_type: float = 2.0
    models: Sequence[torch.nn.Module] = ()


class SequenceBuffers(NamedTuple):
    """Tensors of whole sequences, to be split in place for a while.

    Attributes:
        buffers: The tensors.
        dims: The dim of each along which its tokens lie.
        stay_split: Those of them that need not be put back together.
    """

    buffers: Sequence[torch.Tensor]
    dims: Sequence[int]
    stay_split: Collection[torch.Tensor] = ()


@record(frozen=True)
class PrecisionRequest:
    """The precision that was asked for.

    Attributes:
        name: `no`, `fp16`, `bf16` or `fp8`.
        autocast: Arguments of `torch.autocast`.
        scaler: Arguments of the gradient scaler.
        recipes: The fp8 handlers.
    """

    name: str
    autocast: AutocastKwargs
    scaler: GradScalerKwargs
    recipes: tuple[KwargsHandler, ...] = ()

    def left_to(self, engine: str, world: World, instead: str) -> Precision:
        """Return a precision that changes nothing, for an engine that casts weights and scales losses itself.

        Raises:
            DeviceUnavailableError: The hardware does not support the requested precision.
            EngineUnavailableError: fp8 was requested, for which the message says what to write `instead`.
        """
        if PRECISIONS[self.name].exchanges_layers:
            raise EngineUnavailableError(
                f"{engine} cannot train in {self.name} by mixed_precision; got mixed_precision={self.name!r}. {instead}"
            )
        # Only to check that the hardware supports it.
        precisions.choose(self.name, world, self.autocast, self.scaler)
        return Precision(self.name, self.autocast)


@record
class Parts:
    """What a strategy is built from; users may change some of it between two `prepare`.

    Attributes:
        world: The processes.
        layout: Which rank does what.
        mesh: The device mesh behind `layout`; `None` where the run has no mesh of torch.
        precision: The number format asked for.
        device_placement: Whether models are moved to the device.
        compilation: How models are compiled.
        accumulation: The accumulation window.
        data: How loaders are prepared.
        plugins: The strategy's own plugins, in the order given.
        parallelism: The axes of the mesh and their handlers, or `None`.
    """

    world: World
    layout: Layout
    mesh: DeviceMesh | None
    precision: PrecisionRequest
    device_placement: bool
    compilation: TorchDynamoPlugin
    accumulation: Accumulation
    data: DataLoaderConfiguration
    plugins: tuple[Any, ...] = ()
    parallelism: ParallelismConfig | None = None

    @property
    def plugin(self) -> Any:
        """The strategy's own plugin: of several, the one that is selected; `None` where there is none."""
        return in_use(self.plugins)


class Kit:
    """The methods with which a strategy prepares objects one by one, in the order it needs.

    They go through the Accelerator's own methods, so those that a subclass overrides are called.

    Attributes:
        optimizers: The optimizers prepared so far.
        keep_model: Registers a prepared model in place of any earlier form of the same model.
    """

    def __init__(
        self,
        optimizers: Sequence[AcceleratedOptimizer],
        keep_model: Callable[[torch.nn.Module], None],
        prepare_one: Callable[..., Any],
    ) -> None:
        self.optimizers = optimizers
        self.keep_model = keep_model
        self._prepare_one = prepare_one

    def prepare_model(self, model: torch.nn.Module, placement: bool | None = None) -> torch.nn.Module:
        """Prepare a model by `Strategy.prepare_model`, and register it.

        Args:
            model: The model.
            placement: Whether to move it to the device; `None` uses the setting of the run.

        Returns:
            The prepared model.
        """
        return cast("torch.nn.Module", self._prepare_one(model, first_pass=True, device_placement=placement))

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wrap and register an optimizer; it steps through `Strategy.stepper`.

        Args:
            optimizer: The optimizer.
            placement: Whether to move its state to the device; `None` uses the setting of the run.

        Returns:
            The wrapper.
        """
        return cast(AcceleratedOptimizer, self._prepare_one(optimizer, first_pass=True, device_placement=placement))

    def prepare_loader(self, loader: DataLoader[Any], placement: bool | None = None) -> DataLoader[Any]:
        """Give each rank its part of a loader, as the layout says, and register it.

        Args:
            loader: The loader.
            placement: Whether to move its batches to the device; `None` uses the setting of the run.

        Returns:
            The prepared loader.
        """
        return cast("DataLoader[Any]", self._prepare_one(loader, first_pass=True, device_placement=placement))

    def prepare_scheduler(self, scheduler: object) -> AcceleratedScheduler:
        """Wrap and register a schedule, bound to the optimizers that it steps.

        Args:
            scheduler: A schedule of torch, or any object that steps like one.

        Returns:
            The wrapper.
        """
        return cast(AcceleratedScheduler, self._prepare_one(scheduler))

    def prepare_other(self, given: object) -> object:
        """Return the prepared form of an object of no known kind; the run calls it, after `Strategy.prepare`.

        Args:
            given: The object.
        """
        return self._prepare_one(self._prepare_one(given, first_pass=True))  # a subclass may take it in either pass
