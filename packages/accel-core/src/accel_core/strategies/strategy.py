"""The seam between what users write and how it runs across processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from weakref import ReferenceType, ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accel_core import checkpoint
from accel_core._torch import foreach_mul_
from accel_core.checkpoint.format import CheckpointFormat
from accel_core.checkpoint.plain import PLAIN
from accel_core.data.loader import PreparedLoader
from accel_core.data.presharded import check_read_alike
from accel_core.errors import PreparationError, StateError
from accel_core.mesh.layout import Layout
from accel_core.mesh.tensor import local_part, whole
from accel_core.modules import empty
from accel_core.modules.unwrap import canonical_state_dict, extract_model_from_parallel, register_container
from accel_core.optim.optimizer import Stepper
from accel_core.optim.rebind import ParameterNames
from accel_core.options.enums import DistributedType
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.precision import registry as precisions
from accel_core.precision.precision import Precision
from accel_core.process.world import GroupNeeds, leading
from accel_core.strategies import placement, recipe
from accel_core.strategies.bundle import Bundle, Kind
from accel_core.strategies.parts import Clip, Kit, Parts, PrecisionRequest, SequenceBuffers

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_L = TypeVar("_L")
_owners: MutableMapping[torch.nn.Module, ReferenceType[Strategy]] = WeakIdKeyDictionary()


def strategy_of(model: torch.nn.Module) -> Strategy | None:
    """Return the strategy that prepared a model, or `None` if none did."""
    for form in (model, recipe.inside(model)):
        reference = _owners.get(form)
        if reference is not None:
            return reference()
    return None


def sync_next_backward(model: torch.nn.Module) -> AbstractContextManager[Any]:
    """Return the context of the strategy that prepared a model; see `Strategy.sync_next_backward`.

    Raises:
        StateError: The model stands in a container that no living Accelerator put there.
    """
    strategy = strategy_of(model)
    if strategy is not None:
        return strategy.sync_next_backward(model)
    if extract_model_from_parallel(model, keep_torch_compile=False) is not recipe.inside(model):
        raise StateError(
            f"Only a prepared model's gradients can be synchronized late; got a {type(model).__name__} that was not "
            "prepared, or whose Accelerator is gone. Pass what prepare() returned."
        )
    return nullcontext()


class Strategy(ABC):
    """How models, optimizers and gradients live across processes.

    Called in this order:

    1. Once for a run: `decided_precision`, `lay_out` and `group_needs`, before any process group exists; the
       constructor, with the world, the layout, the mesh and the strategy's own plugins; there `precision`; then
       `label`.
    2. For every `Accelerator.prepare`: `kind_of` for each object, `check`, which may refuse and changes nothing, and
       `prepare`, which owns the order. For each model, `prepare_model`, whose steps are methods of their own: `plan`
       (in `check` already), `convert`, `place`, `split`, `compile_blocks`, `distribute`; for an optimizer, `rebind` and
       `stepper`.
    3. For every batch: `no_sync` around a batch that does not end its window (or `sync_next_backward`), `backward`;
       where the window ends `scale_gradients` if losses had weights, `clip_grad_norm_` or `clip_grad_value_`, and the
       stepper's `step` and `zero_grad`. `join`, `split_context` and `adapt_loader` where the user asks for them.
    4. When saving or loading: `format`, `state_dict`, `weights`. `held` for averages. `unwrap` at any time.
       `release` in `free_memory`.

    A method that is called on a part of the ranks only says so; all others are called on every rank.

    Args:
        parts: What the strategy is built from.

    Attributes:
        parts: The same.
        world: The processes.
        layout: Which rank does what.
        number_format: What `precision` returned.
        plans: What `plan` returned for each model that is being prepared.
    """

    name: ClassVar[str]
    plugin_type: ClassVar[type | None] = None
    """The type of the strategy's own plugin: giving one chooses the strategy."""

    containers: ClassVar[tuple[type[torch.nn.Module], ...]] = ()
    """Classes that this strategy puts around a model, which they hold as `module`."""

    divides_loss: ClassVar[bool] = True
    """Whether the run divides a loss by the length of its accumulation window; an engine may do it itself."""

    receives_weights: ClassVar[bool] = False
    """Whether `prepare` gives a rank that has a model without weights those of another."""

    initializes: bool = False
    """Whether `prepare` gives a model that was made under `empty_init` its first values."""

    evaluates_whole: ClassVar[bool] = True
    """Whether a model that is only evaluated is not distributed: it stays whole on each process."""

    format: CheckpointFormat = PLAIN
    """How models and optimizers lie in a checkpoint. A strategy with several forms sets its own when it is made."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.world = parts.world
        self.layout = parts.layout
        for container in self.containers:
            register_container(container)
        self.number_format = self.precision(parts.precision)
        self.plans: MutableMapping[torch.nn.Module, Any] = WeakIdKeyDictionary()
        self._planned: MutableMapping[torch.nn.Module, list[int]] = WeakIdKeyDictionary()
        self._names = ParameterNames()

    @classmethod
    def lay_out(cls, rank: int, world_size: int, parallelism: ParallelismConfig | None, plugin: Any) -> Layout:
        """Return which rank does what, by arithmetic alone.

        Args:
            rank: This process.
            world_size: Number of processes.
            parallelism: The sizes that the user gave to the axes of the mesh.
            plugin: The strategy's own plugin, which may have sizes of its own.
        """
        sized = parallelism is not None and parallelism.total_size > 1
        return Layout.of(rank, world_size, parallelism.sizes if sized and parallelism is not None else None)

    @classmethod
    def group_needs(cls, plugin: Any) -> GroupNeeds:
        """Return what the process group of the run has to do beyond joining several processes on their devices.

        Args:
            plugin: The strategy's own plugin.
        """
        return GroupNeeds()

    @classmethod
    def decided_precision(cls, plugin: Any) -> str | None:
        """Return the number format that an engine's own configuration decides; `None` if it leaves that to the run.

        Args:
            plugin: The strategy's own plugin.
        """
        return None

    def precision(self, asked: PrecisionRequest) -> Precision:
        """Return the precision of forward passes, with its gradient scaler; an engine may handle both itself.

        Args:
            asked: What the run asks for.

        Raises:
            DeviceUnavailableError: The hardware does not compute in that format.
        """
        return precisions.choose(asked.name, self.world, asked.autocast, asked.scaler, asked.recipes)

    def release(self) -> None:
        """End what keeps prepared objects alive by itself; the run calls it when it lets go of all of them."""
        return

    @property
    def main_rank(self) -> int:
        """The rank that users see as the main process: it prints, logs and tracks for the run."""
        return 0

    @property
    def is_main(self) -> bool:
        """Whether this is that rank."""
        return self.world.rank == self.main_rank and leading()

    @property
    def is_local_main(self) -> bool:
        """Whether this rank prints for its machine: its first one, or its last where the main rank is the last."""
        first = self.main_rank == 0
        return self.world.local_rank == (0 if first else self.world.local_size - 1) and leading()

    @property
    def reading(self) -> Layout:
        """Which part of the data each rank reads from a prepared loader; `adapt_loader` may change it for one."""
        return self.layout

    @abstractmethod
    def label(self) -> DistributedType:
        """Return what users see as `distributed_type`."""

    def kind_of(self, given: object) -> Kind | None:
        """Return the kind of an object that only this strategy recognizes, such as an engine's own schedule.

        Args:
            given: An object passed to `prepare`.
        """
        return None

    def check(self, bundle: Bundle) -> None:
        """Refuse objects that cannot be trained this way, before anything is changed.

        Args:
            bundle: The objects passed to `prepare`.

        Raises:
            PreparationError: A model has no weights, or is trained and has them on disk, packed weights are on another
                device, an optimizer holds parameters that its model lost, or ranks of a replica would read other data.
        """
        for slot in bundle.models:
            placement.refuse_offloaded(slot.given)
            placement.refuse_misplaced(slot.given, self.world.device)
            moved = self.parts.device_placement if slot.place is None else slot.place
            if self.initializes and moved and empty.seed_of(slot.given) is not None:
                empty.check(slot.given)
                continue
            empty.refuse_empty_init(slot.given)
            if not self.receives_weights and moved:
                placement.refuse_empty(slot.given)
        self.check_optimizers(bundle)
        for slot in bundle.loaders:
            self.check_loader(slot.given)
        for slot in bundle.models:
            self._plan(slot.given)

    def check_optimizers(self, bundle: Bundle) -> None:
        """Refuse optimizers that cannot train the models prepared with them, or before.

        Args:
            bundle: The objects passed to `prepare`.

        Raises:
            PreparationError: One holds parameters that its model lost.
        """
        for slot in bundle.optimizers:
            self._names.check(slot.given)

    def check_loader(self, loader: DataLoader[Any]) -> None:
        """Refuse a loader with which ranks of one replica would read different data.

        Args:
            loader: The loader, prepared or not.

        Raises:
            PreparationError: It is split by rank, and not by replica.
        """
        if not isinstance(loader, PreparedLoader):
            check_read_alike(loader, self.reading)

    def prepare(self, bundle: Bundle, kit: Kit) -> None:
        """Prepare a bundle: fill the `result` of its slots.

        Here models come first, because optimizers follow their parameters, then optimizers and loaders, and schedules
        last, because they are bound to prepared optimizers. An engine that needs another order overrides this.

        Args:
            bundle: The objects by kind.
            kit: Prepares and registers what the strategy does not own.
        """
        for slot in bundle.models:
            self._names.remember(self._bare(slot.given))
        models, optimizers = self.number_format.convert_together(
            [slot.given for slot in bundle.models], [slot.given for slot in bundle.optimizers]
        )
        for slot, model in zip(bundle.models, models, strict=True):
            slot.result = kit.prepare_model(model, slot.place)
        self.rebind([*kit.optimizers, *optimizers])
        for slot, optimizer in zip(bundle.optimizers, optimizers, strict=True):
            slot.result = kit.prepare_optimizer(optimizer, slot.place)
        for slot in bundle.loaders:
            slot.result = kit.prepare_loader(slot.given, slot.place)
        for slot in bundle.schedulers:
            slot.result = kit.prepare_scheduler(slot.given)

    def prepare_model(
        self, model: torch.nn.Module, *, device_placement: bool | None = None, evaluation: bool = False
    ) -> torch.nn.Module:
        """Prepare one model, step by step; a strategy replaces the steps, not their order.

        Args:
            model: The model. Of a compiled one the inside is prepared, and compiled again as it was.
            device_placement: Move it to the device; `None` leaves that to the run.
            evaluation: It is not trained, so it need not be distributed.

        Returns:
            The model, or what wraps it.
        """
        given, inside = model, recipe.inside(model)
        if self.is_prepared(inside):
            self.adopt(inside)
            self._own(given)
            return given
        if not self.has_planned(given):
            self._plan(given)
        self._names.remember(self._bare(inside))
        forward_before = inside.__dict__.get("forward")
        model = self.convert(inside)
        if self.parts.device_placement if device_placement is None else device_placement:
            self.place(model)
        model = self.number_format.wrap(model)
        model = self.split(model)
        if given is inside:
            model = self.compile_blocks(model)
        if not (evaluation and self.evaluates_whole):
            model = self.distribute(model)
        if given is inside:
            model = recipe.compile_whole(model, self.parts.compilation)
        else:
            model = recipe.keep_compiled(given, model, forward_before)
        self._own(model)
        return model

    def is_prepared(self, model: torch.nn.Module) -> bool:
        """Return whether a model that is not compiled was prepared before, so that `adopt` is all it needs.

        Args:
            model: The model, or the inside of a compiled one.
        """
        return isinstance(model, self.containers)

    def adopt(self, model: torch.nn.Module) -> None:
        """Take over a model that was prepared before, here or by its user.

        Args:
            model: The prepared model.
        """
        self._names.remember(self._bare(model))

    def plan(self, model: torch.nn.Module) -> Any:
        """Return what later steps have to know of a model as it is, for `plans`; refuse one that cannot be prepared.

        It is called once for a model, on every rank, and changes nothing.

        Args:
            model: The model, compiled or not.

        Raises:
            PreparationError: The model cannot be prepared.
        """
        return None

    def has_planned(self, model: torch.nn.Module) -> bool:
        """Return whether a model was planned in this `prepare`, and has the same parameters since.

        Args:
            model: The model, compiled or not.
        """
        inside = recipe.inside(model)
        return inside in self.plans and self._planned.get(inside) == [*map(id, inside.parameters())]

    def _plan(self, model: torch.nn.Module) -> None:
        inside = recipe.inside(model)
        self.plans[inside] = self.plan(model)
        self._planned[inside] = [*map(id, inside.parameters())]

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Exchange layers or parameters of a model as its number format asks, in place.

        Args:
            model: The model, not compiled.

        Returns:
            The same model, or another in its place.
        """
        return self.number_format.convert(model)

    def place(self, model: torch.nn.Module) -> None:
        """Move a model to the device of this process; one that was made under `empty_init` gets its values there.

        Args:
            model: The model, which is changed.
        """
        if empty.seed_of(model) is None:
            placement.move(model, self.world.device)
        else:
            empty.initialize(model, self.world.device)

    def split(self, model: torch.nn.Module) -> torch.nn.Module:
        """Change a model inside, before its blocks are compiled, as where several ranks share one replica.

        Args:
            model: The model on its device.

        Returns:
            The same model, or another in its place.
        """
        return model

    def compile_blocks(self, model: torch.nn.Module) -> torch.nn.Module:
        """Compile the repeated blocks of a model, if the run compiles by region.

        Args:
            model: The model, split if it is to be.

        Returns:
            The model whose blocks are compiled, or the model as it was.
        """
        return recipe.compile_blocks(model, self.parts.compilation)

    def distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make a model on its device train together with those of the other processes.

        Args:
            model: The model, already on its device.

        Returns:
            The model to call in training: the same one, or a wrapper around it.
        """
        raise StateError(
            f"A strategy says how processes train one model; got {self.name!r}, which has no `distribute`. Write it, "
            "or a `prepare_model` of its own."
        )

    def rebind(self, optimizers: Iterable[Any]) -> None:
        """Point optimizers to the present parameters of prepared models.

        Args:
            optimizers: The optimizers, wrapped or not.

        Raises:
            PreparationError: An optimizer holds parameters that its model no longer has.
        """
        for optimizer in optimizers:
            self._names.rebind(optimizer)

    def stepper(self, optimizer: torch.optim.Optimizer) -> Stepper | None:
        """Return what performs an optimizer's `step` and `zero_grad`; `None` if the optimizer does so itself.

        Args:
            optimizer: An optimizer as the user made it, not yet wrapped.
        """
        return None

    def holds_whole(self, model: torch.nn.Module) -> bool:
        """Return whether each process trains a whole copy of a prepared model, as Local SGD requires.

        Args:
            model: A prepared model.
        """
        return False

    def held(self, model: torch.nn.Module, *, buffers: bool = False) -> list[torch.Tensor]:
        """Return the parameters that this rank holds, whole or in parts, after freeing what was gathered of others.

        A rank may call it alone. What is written into the result is what the model computes with next.

        Args:
            model: A prepared model.
            buffers: Return its buffers too.

        Raises:
            EngineUnavailableError: The weights are out of reach, as in an engine.
        """
        bare = self._bare(model)
        return [*bare.parameters(), *(bare.buffers() if buffers else ())]

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """Compute gradients, scaled where the number format asks for it.

        Args:
            loss: A scalar, already divided for its accumulation window.
            **kwargs: Passed to `Tensor.backward`.
        """
        scaler = self.number_format.scaler
        scaled: torch.Tensor = loss if scaler is None else scaler.scale(loss)
        scaled.backward(**kwargs)  # type: ignore[no-untyped-call]

    def scale_gradients(self, factor: float, models: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> None:
        """Multiply the gradients of a window, complete on every rank, wherever they live.

        Args:
            factor: By what.
            models: The models that the window trained.
            optimizers: The prepared optimizers, for a loop that prepared no model.

        Raises:
            StateError: No gradient was found where this strategy keeps them.
        """
        parameters = [p for model in models for p in model.parameters()] or [
            p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
        ]
        # By identity: a gradient that two models share is scaled once. By parts: torch scales no mixture of distributed
        # and plain tensors, and of several meshes nothing where this rank is not on the first.
        gradients = {id(each.grad): local_part(each.grad) for each in parameters if each.grad is not None}
        if not gradients:
            raise StateError(
                "The losses of this window have weights, but there are no gradients to apply them to; got "
                f"{len(models)} models. Prepare the model that the losses come from, or pass it to accumulate()."
            )
        foreach_mul_(list(gradients.values()), factor)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes of a model do not synchronize gradients.

        Args:
            model: A prepared model; other models go on synchronizing.
        """
        return nullcontext()

    def sync_next_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward pass synchronizes gradients although its forward pass ran under `no_sync`.

        Args:
            model: A prepared model.
        """
        return nullcontext()

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context in which ranks with fewer batches shadow the collectives of those with more.

        Args:
            joinables: Prepared models and optimizers.

        Raises:
            PreparationError: The strategy cannot do that, and several processes take part.
        """
        if self.world.size == 1:
            return nullcontext()
        raise PreparationError(
            f"The strategy {self.name!r} cannot join processes with different numbers of batches; got "
            f"{len(joinables)} models or optimizers on {self.world.size} processes. "
            'Use DataLoaderConfiguration(uneven_end="empty") or even batches instead of join_uneven_inputs.'
        )

    def split_context(self, given: SequenceBuffers) -> AbstractContextManager[None]:
        """Return a context that splits tensors along their sequence dims; without context parallelism, it does nothing.

        Args:
            given: Tensors of whole sequences, split in place for the length of the context.
        """
        return nullcontext()

    def whole_metrics(self, value: _L) -> _L:
        """Return metrics of whole samples where each rank computed them from a part of each sample.

        Args:
            value: A tensor, or a nest of tensors.

        Raises:
            DataError: The values cannot be combined.
        """
        return value

    def adapt_loader(self, loader: _L, model: torch.nn.Module) -> _L:
        """Adapt a loader to sequence parallelism; without it, the loader is returned unchanged.

        Args:
            loader: A prepared loader.
            model: The prepared model that it feeds.

        Returns:
            The same loader.
        """
        return loader

    def clip_grad_norm_(self, clip: Clip) -> torch.Tensor:
        """Scale gradients down to a common norm.

        Args:
            clip: Which gradients, and how.

        Returns:
            The norm before clipping.
        """
        return torch.nn.utils.clip_grad_norm_(clip.parameters, clip.limit, clip.norm_type)

    def clip_grad_value_(self, clip: Clip) -> None:
        """Clip each gradient element to a range around zero.

        Args:
            clip: Which gradients, and how.
        """
        torch.nn.utils.clip_grad_value_(clip.parameters, clip.limit)

    def unwrap(self, model: torch.nn.Module, *, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Return the model inside what `prepare_model` returned.

        Args:
            model: A prepared model.
            keep_fp32_wrapper: Whether its forward method still computes in mixed precision.
            keep_torch_compile: Whether a compiled model stays compiled.
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def state_dict(self, model: torch.nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole model's state on every rank.

        Args:
            model: A prepared model.
            unwrap: Under the bare model's names; else under those of what wraps it.
        """
        state = canonical_state_dict(model) if unwrap else model.state_dict()
        return {name: whole(value) for name, value in state.items()}

    def whole_of(self, parameter: torch.Tensor, value: torch.Tensor | None) -> Any:
        """Return whole what belongs to a parameter of a prepared model: its value, or its gradient.

        Args:
            parameter: The parameter, of which this rank may hold a part, or nothing.
            value: What it has here.

        Returns:
            The whole tensor on every rank; `None` where there is none.
        """
        return None if value is None else whole(value.detach())

    def weights(self, model: torch.nn.Module) -> Iterable[tuple[str, Any]]:
        """Yield the names and weights that `save_model` writes, in the same order on every rank.

        A weight that several ranks hold together is a `SpreadWeight`: shape, dtype and how to gather it. Every rank
        gathers one weight after the other, and only the ranks that write keep the result.

        Args:
            model: The prepared model.
        """
        return checkpoint.weights.weights_of(model)

    def _bare(self, model: torch.nn.Module) -> torch.nn.Module:
        bare: torch.nn.Module = self.unwrap(model, keep_torch_compile=False)
        return bare

    def _own(self, model: torch.nn.Module) -> None:
        """Note that a model is this strategy's, for `strategy_of`: it prepared it, here or before it was pickled."""
        _owners[model] = ref(self)
        self._names.release(self._bare(model))
