"""The wired parts of one Accelerator."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from accel_core import checkpoint
from accel_core._passed import Passed, PassedOn
from accel_core._records import record
from accel_core._torch import compiles_itself
from accel_core.comm.control import Channel
from accel_core.comm.objects import broadcast_object_list, gather_object
from accel_core.data.loader import PreparedLoader
from accel_core.data.prepare import prepare_data_loader
from accel_core.errors import ConfigurationError, PreparationError, RankDisagreementError, StateError, expect
from accel_core.logging import get_logger
from accel_core.mesh.layout import Layout
from accel_core.mesh.tensor import is_spread
from accel_core.modules import empty, linear_loss
from accel_core.modules.compilation import is_compiled_module
from accel_core.optim.accumulation import Accumulation
from accel_core.optim.average import ModelAverage, check_settings
from accel_core.optim.optimizer import AcceleratedOptimizer, is_lomo, lomo_backward
from accel_core.optim.scheduler import AcceleratedScheduler
from accel_core.options.engines import engines, load
from accel_core.plugins.handlers import KwargsHandler
from accel_core.plugins.loading import DataLoaderConfiguration
from accel_core.plugins.project import ProjectConfiguration
from accel_core.precision import scaler as scalers
from accel_core.precision.precision import Precision
from accel_core.process.world import World
from accel_core.state.gradient import GradientState
from accel_core.strategies.bundle import Bundle, Kind, kind_of
from accel_core.strategies.parts import Kit
from accel_core.strategies.strategy import Strategy
from accel_core.tqdm import byte_bar
from accel_core.tracking.hub import TrackerHub

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import DataLoader

    from accel_core.checkpoint import background

_logger = get_logger(__name__)
_T = TypeVar("_T")
_PREPARED = ("models", "optimizers", "schedulers", "dataloaders")
_REGISTERED = ("custom_objects", "save_state_pre_hooks", "load_state_pre_hooks")


@record
class Runtime:
    """Everything that one Accelerator works with; made by `resolve`, passed to everybody else."""

    world: World  # the processes
    strategy: Strategy  # how models live across them
    gradient_state: GradientState  # where the step stands
    accumulation: Accumulation  # the accumulation window
    project: ProjectConfiguration  # where files go
    hub: TrackerHub  # the trackers
    handlers: dict[str, Any]  # the keyword handlers that the user passed, by type name
    rng_types: list[Any]  # generators that are made equal on all ranks at the start of each epoch
    step_scheduler_with_optimizer: bool  # whether schedules move with their optimizers
    has_trained: bool = False  # whether a backward pass has begun
    models: list[Any] = field(default_factory=list)  # prepared models, and so on for the other lists
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    schedulers: list[AcceleratedScheduler] = field(default_factory=list)
    dataloaders: list[Any] = field(default_factory=list)
    custom_objects: list[Any] = field(default_factory=list)
    averages: list[ModelAverage] = field(default_factory=list)  # which the prepared optimizers update
    extensions: list[Any] = field(default_factory=list)  # of kind `Extension`, which take part at the borders below
    meter: Any = None  # the one of them that measures the steps
    replicas: Any = None  # the copies of this run that train with it, where an extension has some
    save_state_pre_hooks: OrderedDict[int, Callable[..., None]] = field(default_factory=OrderedDict)
    load_state_pre_hooks: OrderedDict[int, Callable[..., None]] = field(default_factory=OrderedDict)

    data = PassedOn[DataLoaderConfiguration]("strategy.parts.data", "How loaders are prepared.")

    device_placement = PassedOn[bool]("strategy.parts.device_placement", "Whether objects are moved to the device.")

    def set_handler(self, kind: type[KwargsHandler], handler: KwargsHandler | None) -> None:
        """Replace the handler of a kind, or remove it."""
        self.handlers.pop(kind.__name__, None)
        if handler is not None:
            self.handlers[kind.__name__] = handler

    def set_plugin(self, kind: type[KwargsHandler], handler: KwargsHandler | None) -> None:
        """Replace the handler of a kind that the strategy reads too, or remove it."""
        self.set_handler(kind, handler)
        others = [plugin for plugin in self.strategy.parts.plugins if not isinstance(plugin, kind)]
        self.strategy.parts.plugins = (*others, *([] if handler is None else [handler]))

    def register(self, objects: Sequence[object]) -> None:
        """Save and restore objects with `state_dict` and `load_state_dict` with the training state; refuse others."""
        wrong = [
            f"{type(item).__name__} (number {index})"
            for index, item in enumerate(objects)
            if not callable(getattr(item, "state_dict", None)) or not callable(getattr(item, "load_state_dict", None))
        ]
        if wrong:
            raise ConfigurationError(
                f"Objects to be checkpointed need state_dict() and load_state_dict(); got {', '.join(wrong)}, which "
                "lack one. Add the two methods; nothing was registered."
            )
        self.custom_objects.extend(objects)

    def kind_of(self, given: object) -> Kind | None:
        """Return the kind of an object that `prepare` was given: the strategy's own answer, or the common one."""
        return self.strategy.kind_of(given) or kind_of(given)

    precision = Passed[Precision]("strategy.number_format", "The number format.")

    layout = Passed[Layout]("strategy.layout", "Which rank does what.")

    @property
    def reading(self) -> Layout:
        """Which part of the data each rank reads from a loader that is prepared now."""
        layout = self.strategy.reading
        for extension in self.extensions:
            layout = extension.reading(layout)
        return layout

    @property
    def mesh(self) -> DeviceMesh | None:
        """The device mesh, where the run has one."""
        return self.strategy.parts.mesh

    scaler = PassedOn[torch.amp.GradScaler | None](
        "strategy.number_format.scaler", "The gradient scaler of fp16 training."
    )

    step = PassedOn[int]("accumulation.step", "Number of batches since the last end of the data.")

    def prepare(self, objects: Sequence[Any], placement: Sequence[bool | None] | None, kit: Kit) -> tuple[Any, ...]:
        """Prepare objects together, in the strategy's order; if one is refused, nothing was prepared."""
        self._receive(objects)
        bundle = Bundle.sort(objects, placement, self.strategy.kind_of)
        with self._checked(bundle):
            self.strategy.prepare(bundle, kit)
        for slot in bundle.others:
            slot.result = kit.prepare_other(slot.given)
        for slot in bundle.recognised:
            slot.result._is_accelerate_prepared = True  # by this name libraries ask
        return bundle.results

    def prepare_model(
        self, model: torch.nn.Module, placement: bool | None = None, *, evaluation: bool = False
    ) -> torch.nn.Module:
        """Prepare one model; see `Strategy.prepare_model`."""
        fits = isinstance(model, torch.nn.Module)
        expect(fits, model, "A model is a torch.nn.Module", "Pass it to prepare() to let it through.")
        self._receive([model])
        # What is only evaluated need not be trainable, which is what `check` looks at.
        new = Bundle.sort([] if evaluation else [model], [] if evaluation else [placement])
        with nullcontext() if self.strategy.has_planned(model) else self._checked(new):
            prepared = self.strategy.prepare_model(model, device_placement=placement, evaluation=evaluation)
        self.strategy.rebind(self.optimizers)
        self.keep_model(prepared)
        return prepared

    def _receive(self, objects: Sequence[object]) -> None:
        """Switch to the strategy of models that were loaded sharded, where a package has one."""
        models = [each for each in objects if isinstance(each, torch.nn.Module)]
        if self.world.size > 1 and any(is_spread(own) for each in models for own in each.parameters()):
            for home in [engine.takes for engine in engines().values() if engine.takes]:
                self.strategy = load(home)(self, models)

    @contextmanager
    def _checked(self, bundle: Bundle) -> Iterator[None]:
        """Let the strategy check and plan a bundle, and drop its plans where the block ends."""
        try:
            for slot in () if self.strategy.initializes else bundle.models:
                empty.refuse_empty_init(slot.given)
            if bundle.slots:
                self.strategy.check(bundle)
            yield
        finally:
            self.strategy.plans.clear()

    def keep_model(self, model: torch.nn.Module) -> None:
        """Register a prepared model in place of any earlier form of the same model."""
        for extension in self.extensions:
            extension.keep_model(model)
        linear_loss.apply_where_asked(self.strategy.unwrap(model, keep_torch_compile=False))
        place = self.place_of(model)
        if place is None:
            self.models.append(model)
        else:
            self.models[place] = model

    def place_of(self, model: torch.nn.Module) -> int | None:
        """Return which prepared model has the same inside as a model, by its number; `None` where none has."""
        inner = self.strategy.unwrap(model, keep_torch_compile=False)
        bare = (self.strategy.unwrap(kept, keep_torch_compile=False) for kept in self.models)
        return next((place for place, kept in enumerate(bare) if kept is inner), None)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wrap one optimizer; the same optimizer again gives the same wrapper."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return self._joined(optimizer)
        for kept in self.optimizers:
            if kept.optimizer is optimizer:
                return kept
        self.strategy.rebind([optimizer])
        wrapper = AcceleratedOptimizer(
            optimizer,
            device_placement=self.device_placement if placement is None else placement,
            scaler=self.scaler,
            stepper=self.strategy.stepper(optimizer),
            gradient_state=self.gradient_state,
        )
        wrapper.place(self.world.device)
        return self._joined(wrapper)

    def _joined(self, optimizer: AcceleratedOptimizer) -> AcceleratedOptimizer:
        """Register a wrapped optimizer, and return it."""
        optimizer.averages, optimizer.siblings = self.averages, self.optimizers
        return _once(self.optimizers, optimizer)

    def prepare_scheduler(self, scheduler: object) -> AcceleratedScheduler:
        """Wrap one schedule, bound to the prepared optimizer that it steps, or else to all of them."""
        if isinstance(scheduler, AcceleratedScheduler):
            return _once(self.schedulers, scheduler)
        for kept in self.schedulers:
            if kept.scheduler is scheduler:
                return kept
        moved = getattr(scheduler, "optimizer", None)
        own = [kept for kept in self.optimizers if moved is not None and (kept is moved or kept.optimizer is moved)]
        wrapped = AcceleratedScheduler(
            scheduler,
            own or self.optimizers,  # the list itself: its own may be prepared after it
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.data.split_batches,
            replicas=self.layout.replicas,
            gradient_state=self.gradient_state,
        )
        return _once(self.schedulers, wrapped)

    def prepare_loader(
        self, loader: DataLoader[Any], placement: bool | None = None, slice_fn: Callable[..., Any] | None = None
    ) -> DataLoader[Any]:
        """Give each rank its part of a loader; a prepared one is returned unchanged."""
        if isinstance(loader, PreparedLoader):
            return _once(self.dataloaders, loader)
        self.strategy.check_loader(loader)
        left_out = {"restore_position", *(["uneven_end"] if self.data.uneven_end == "drop" else [])}
        prepared = prepare_data_loader(
            loader,
            self.world.device,
            layout=self.reading,
            put_on_device=self.device_placement if placement is None else placement,
            rng_types=list(self.rng_types),
            slice_fn_for_dispatch=slice_fn,
            **{name: value for name, value in vars(self.data).items() if name not in left_out},
        )
        for extension in self.extensions:
            extension.keep_loader(prepared)
        return _once(self.dataloaders, prepared)

    def average(
        self, model: torch.nn.Module, decay: float, every: int, device: object, buffers: object
    ) -> ModelAverage:
        """Make an average of a prepared model, on all ranks or on none; see `Accelerator.ema`."""
        channel = Channel(self.world, "accelerator.ema")
        with channel.together("Making an average of weights"):
            place = check_settings(decay, every, device, buffers)
            number = self.place_of(model) if isinstance(model, torch.nn.Module) else None
            if number is None:
                raise PreparationError(
                    f"An average follows a prepared model; got a {type(model).__name__} that was not prepared. Call "
                    "accelerator.prepare first, and pass the model that it returns."
                )
            averages = buffers == "average"
            held = partial(self.strategy.held, model, buffers=averages)
            made = ModelAverage(model, held, decay=decay, every=every, device=place, buffers=averages)
        given = channel.exchange((number, decay, every, buffers))
        if len(set(given)) > 1:
            raise RankDisagreementError(
                "An average is the same on all ranks; got, by rank, as model, decay, every and buffers "
                f"{', '.join(map(str, given))}. Pass the same arguments on every rank."
            )
        self.averages.append(made)
        return made

    def to_save(self) -> Runtime:
        """Return the run as it lies in a checkpoint, averages as optimizers; refuse one whose average is in place."""
        for average in self.averages:
            average.refuse_applied("save_state() or load_state()")
        if self.scaler is not None:
            scalers.adapt(self.scaler)
        states: list[Any] = [average.state for average in self.averages]
        return replace(self, optimizers=[*self.optimizers, *states]) if states else self

    def save_state(self, output_dir: str | os.PathLike[str] | None, **arguments: Any) -> Path | background.Handle:
        """Save the state of the run; see `Accelerator.save_state`."""
        run: Callable[..., Path | background.Handle] = self._save_state
        for extension in self.extensions:
            run = partial(extension.save_state, run)
        return run(output_dir, **arguments)

    def _save_state(self, output_dir: str | os.PathLike[str] | None, **arguments: Any) -> Path | background.Handle:
        with byte_bar("Saving"):
            return checkpoint.save.save_state(self.to_save(), output_dir, **arguments)

    def backward(self, loss: torch.Tensor, weight: torch.Tensor | float | None, arguments: dict[str, Any]) -> None:
        """Compute gradients of a batch's loss, and complete those of a weighted window; see `Accelerator.backward`."""
        run = self._backward
        for extension in self.extensions:
            run = partial(extension.backward, run)
        run(loss, weight, arguments)

    def _backward(self, loss: torch.Tensor, weight: torch.Tensor | float | None, arguments: dict[str, Any]) -> None:
        accumulation, strategy = self.accumulation, self.strategy
        if self.gradient_state.passes >= 0:
            self.gradient_state.passes += 1
        rate = arguments.pop("learning_rate", None) if arguments else None
        if rate is not None and any(is_lomo(optimizer) for optimizer in self.optimizers):
            if weight is not None:
                raise ConfigurationError(
                    "A LOMO optimizer updates inside backward, before the weights of a window are known; got a weight. "
                    "Pass the mean loss, without weight."
                )
            lomo_backward(self.optimizers, accumulation.share_of(loss, None, strategy.divides_loss), rate)
            return
        if not self.models and self.world.size > 1:
            _warn_of_no_model(self.world.size)
        elif not self.has_trained:
            self.has_trained = True
            if self.world.size > 1:
                _warn_of_bypassed(self.models)
        if self.scaler is not None:  # gradients of other batches of a window have the scale as it is
            bare = [_bare(optimizer) for optimizer in self.optimizers]
            scalers.begin(self.scaler, bare, adapts=not accumulation.ends_several)
        if weight is not None and (accumulation.is_closed or self.gradient_state.awaits_step):
            self._refuse_second_loss()
        loss = accumulation.share_of(loss, weight, strategy.divides_loss)
        strategy.backward(loss, **arguments)
        if weight is not None and self.gradient_state.sync_gradients:
            factor = accumulation.close_weighted(self.world)
            if factor is not None:
                strategy.scale_gradients(factor, accumulation.models or self.models, self.optimizers)
                self.gradient_state.awaits_step = True

    def _refuse_second_loss(self) -> None:
        """Refuse a loss with a weight whose window was completed without it.

        Raises:
            StateError: One of several batches was, or one whose gradients are still there.
        """
        models = self.accumulation.models or self.models
        parameters = (parameter for model in models for parameter in model.parameters())
        here = self.gradient_state.awaits_step and any(parameter.grad is not None for parameter in parameters)
        if here or (self.accumulation.is_closed and self.accumulation.ends_several):
            raise StateError(
                "With weighted losses, call backward() once for the last batch of a window; got another such loss "
                "before optimizer.step(), or in a window of several batches. Add up the losses that a batch has for "
                "one model; of several models, step each before the loss of the next, with one batch in a window."
            )

    def timed(self, part: str) -> AbstractContextManager[object]:
        """Return a block to put around an exchange between ranks, or around a save."""
        return _all(extension.timed(part) for extension in self.extensions)

    def unscale(self, optimizers: object = None) -> None:
        """Divide gradients by the scale of fp16 training, once a window."""
        if self.strategy.number_format.scaler is None or not self.gradient_state.sync_gradients:
            return
        chosen = self.optimizers if optimizers is None else optimizers
        self.precision.unscale(_bare(item) for item in (chosen if isinstance(chosen, list | tuple) else [chosen]))

    @property
    def scale_left(self) -> float:
        """What gradients stay multiplied by, for fp16, until their window ends."""
        return 1.0 if self.scaler is None or self.gradient_state.sync_gradients else self.scaler.get_scale()

    @contextmanager
    def join_uneven(self, joinables: Sequence[Any], even_batches: bool | None) -> Iterator[None]:
        """Join ranks with different numbers of batches; see `Accelerator.join_uneven_inputs`."""
        steps = list[object]()
        with _all(extension.uneven() for extension in self.extensions):
            with self.strategy.join(joinables):
                own = self.optimizers if self.world.size > 1 else []
                hooks = [each.optimizer.register_step_post_hook(lambda *_: steps.append(None)) for each in own]
                shared_out = even_batches is not None and self.world.size > 1
                changed = _override_even_batches(self.dataloaders, bool(even_batches)) if shared_out else []
                try:
                    yield
                finally:
                    for sampler, before in changed:
                        sampler.even_batches = before
                    for hook in hooks:
                        hook.remove()
            self._catch_up(len(steps))

    def _catch_up(self, steps: int) -> None:
        """Take over from the rank that made most steps what DDP does not exchange: the states behind the weights."""
        told = gather_object([(steps, 0.0 if self.scaler is None else -self.scaler.get_scale())])
        source = told.index(max(told))
        if min(told) == max(told):
            return
        parts: list[Any] = [*self.optimizers, *self.schedulers, *(each.state for each in self.averages)]
        parts += [] if self.scaler is None else [self.scaler]
        states: Any = None
        if self.world.rank == source:
            on_cpu = partial(tree_map, lambda value: value.cpu() if isinstance(value, torch.Tensor) else value)
            states = on_cpu([each.state_dict() for each in parts])
        (states,) = broadcast_object_list([states], from_process=source)
        for each, state in zip(parts, states, strict=True) if self.world.rank != source else ():
            each.load_state_dict(state)

    def prepared(self) -> dict[str, Any]:
        """Return what was prepared and registered, for `adopt` in another process."""
        if self.scaler is not None:
            scalers.adapt(self.scaler)  # torch's is pickled between steps only
        return {name: getattr(self, name) for name in (*_PREPARED, *_REGISTERED, "scaler", "step")}

    def adopt(self, prepared: Mapping[str, Any]) -> None:
        """Take over the objects that another runtime has prepared."""
        for name, value in prepared.items():
            setattr(self, name, value)
        for optimizer in self.optimizers:
            self._joined(optimizer)
        for model in self.models:
            self.strategy._own(model)
            for extension in self.extensions:
                extension.keep_model(model)

    def release(self) -> None:
        """Let go of every prepared object and restart the accumulation window."""
        for extension in self.extensions:
            extension.release()
        self.strategy.release()
        for name in _PREPARED:
            getattr(self, name).clear()
        self.averages.clear()
        self.accumulation.restart()
        if self.scaler is not None:
            scalers.forget(self.scaler)


def _all(blocks: Iterable[AbstractContextManager[object]]) -> AbstractContextManager[object]:
    """Return several blocks, which are entered, as one."""
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block)
        return stack.pop_all()


def _once(kept: list[Any], item: _T) -> _T:
    """Put an object into a list that does not have it yet, and return it."""
    if all(each is not item for each in kept):
        kept.append(item)
    return item


def _bare(optimizer: object) -> Any:
    """Return the optimizer inside its wrappers."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _override_even_batches(loaders: Sequence[Any], even_batches: bool) -> list[tuple[Any, bool]]:
    """Set `even_batches` of the map-style loaders, and return their samplers with what each had before."""
    changed: list[tuple[Any, bool]] = []
    for loader in loaders:
        sampler = loader.batch_sampler if isinstance(loader, PreparedLoader) else None
        if sampler is not None and hasattr(sampler, "even_batches"):
            changed.append((sampler, sampler.even_batches))
            sampler.even_batches = even_batches
    if loaders and not changed:
        warnings.warn(
            "even_batches was overridden, but only loaders over iterable datasets were prepared; they keep theirs.",
            stacklevel=4,
        )
    return changed


def _warn_of_no_model(ranks: int) -> None:
    """Warn of ranks that compute gradients and prepared no model: nobody averages them."""
    _logger.warning_once(
        f"Ranks train together through prepared models; got none on {ranks} ranks: nothing averages their gradients. "
        "Pass the model to prepare(), with its optimizer and loader."
    )


def _warn_of_bypassed(models: Sequence[torch.nn.Module]) -> None:
    """Warn of a loss that no prepared model computed: the script goes on with what it passed to `prepare`."""
    wrapped = [each for each in models if isinstance(each, DistributedDataParallel)]
    traced = any(is_compiled_module(each) or compiles_itself(each) for each in models)
    # torch's own mark of a first forward pass, which it does not set in one that it compiles
    if wrapped and not traced and not any(each._lazy_init_ran for each in wrapped):
        _logger.warning(
            "backward() got a loss that no prepared model computed, so ranks do not average its gradients. Use what "
            "prepare() returns: model, optimizer, loader = accelerator.prepare(model, optimizer, loader)."
        )
