"""Data parallel: every process holds the whole model and reads its own part of the data."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from accel_core.comm.control import in_step
from accel_core.errors import PartView, PreparationError
from accel_core.host import environ
from accel_core.logging import get_logger
from accel_core.modules.unwrap import ddp_of, ignored_by_ddp, trained_by_ddp
from accel_core.options.enums import DistributedType
from accel_core.plugins.handlers import DistributedDataParallelKwargs
from accel_core.strategies.bundle import Bundle
from accel_core.strategies.parts import Parts
from accel_core.strategies.placement import devices_of, is_spread, refuse_sharded
from accel_core.strategies.strategy import Strategy

_logger = get_logger(__name__)


class DataParallelStrategy(Strategy):
    """`DistributedDataParallel` around each model; gradients are averaged while backward runs."""

    name = "ddp"
    initializes = True
    plugin_type = DistributedDataParallelKwargs
    containers = (DistributedDataParallel,)

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._known: MutableMapping[torch.nn.Module, _Known] = WeakIdKeyDictionary()
        self._checked: list[ReferenceType[_Known]] = []  # the same, as iterating the other takes 10 µs in each step

    def label(self) -> DistributedType:
        """Return the label of several processes on this device."""
        return self.world.hardware.label

    def check(self, bundle: Bundle) -> None:
        """Also refuse a model spread over several devices, and one with parameters new to its wrapper."""
        super().check(bundle)
        for slot in bundle.models:
            refuse_sharded(slot.given)
            self._refuse_new_parameters(self._bare(slot.given))  # DDP would not average their gradients
        if environ.flag("ACCELERATE_BYPASS_DEVICE_MAP"):
            return
        for slot in bundle.models:
            # Copies of a spread model would share its devices.
            devices = devices_of(slot.given)
            if len(devices) > 1:
                raise PreparationError(
                    f"A model spread over {', '.join(sorted(devices))} by a device map cannot train data parallel: "
                    f"each of the {self.world.size} processes would need all of them. Load it without a device map, or "
                    "start one process. (ACCELERATE_BYPASS_DEVICE_MAP=true overrides this.)"
                )

    def distribute(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap a model that has parameters to train; the same model again gives the same wrapper."""
        trained, known = [*trained_by_ddp(model).values()], self._known.get(model)
        wrapper = None if known is None else known.wrapper()
        if known is None or wrapper is None:
            wrapper = self._wrap(model) if trained else None
            self._known[model] = known = _Known(model, wrapper, trained)
            self._checked.append(ref(known))
        left_out = ignored_by_ddp(model)
        rest = [each for name, each in model.named_parameters() if not each.requires_grad and name not in left_out]
        known.frozen = [ref(each) for each in rest]
        return wrapper if trained and wrapper is not None else model

    def _refuse_new_parameters(self, model: torch.nn.Module) -> None:
        """Refuse a bare model that trains parameters which its wrapper, if it has one, does not know."""
        known = self._known.get(model)
        if known is None or known.wrapper() is None:
            return
        averaged = set(map(id, known.parameters))
        new = [name for name, each in trained_by_ddp(model).items() if id(each) not in averaged]
        if new:
            raise PreparationError(
                "DistributedDataParallel averages the gradients of the parameters that a model trained when it was "
                f"prepared; got the same model with {len(new)} others: {', '.join(new[:3])}. Add and unfreeze "
                "parameters before prepare(), or delete the prepared model, call accelerator.free_memory() and "
                "prepare everything again."
            )

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """Also refuse, where gradients are averaged, those of parameters that were frozen in `prepare`, or cast since.

        Raises:
            PreparationError: There are such gradients.
        """
        try:
            super().backward(loss, **kwargs)
        finally:  # torch has an error of its own where a part of a model was cast
            for reference in self._checked:
                known = reference()
                if known is not None and (lost := known.cast()):
                    self._refuse_gradients(known, lost, "changed their format or device since", "Cast and move")
                if known is not None and (lost := known.unfrozen()):
                    self._refuse_gradients(known, lost, "were frozen then", "Unfreeze")

    def _refuse_gradients(self, known: _Known, parameters: Sequence[torch.Tensor], why: str, advice: str) -> None:
        """Refuse gradients that nobody averages, unless those of this pass are not to be averaged."""
        model, wrapper = known.model(), known.wrapper()
        if model is None or (wrapper is None and known.was_wrapped):
            return  # it was let go of
        state = self.parts.accumulation.gradient_state
        if not (state.sync_gradients if wrapper is None else wrapper.require_backward_grad_sync):
            return
        held = set(map(id, parameters))
        names = [name for name, each in model.named_parameters() if id(each) in held and each.grad is not None]
        raise PreparationError(
            "DistributedDataParallel averages the gradients of the parameters that a model trained when it was "
            f"prepared; got gradients of {len(names)} that {why}: {', '.join(names[:3])}. {advice} parameters before "
            "prepare(), or delete the prepared model, call accelerator.free_memory() and prepare everything again."
        )

    def _wrap(self, model: torch.nn.Module) -> DistributedDataParallel:
        # A subclass may have a plugin of its own, beside the arguments of DDP.
        given = (plugin for plugin in self.parts.plugins if isinstance(plugin, DistributedDataParallelKwargs))
        settings = next(given, None) or DistributedDataParallelKwargs()
        arguments = settings.to_kwargs()
        if self.world.device.index is not None and not is_spread(model):
            arguments |= {"device_ids": [self.world.device.index], "output_device": self.world.device.index}
        # The constructor compares and broadcasts parameters in collectives of its own.
        with in_step(self.world, "prepare: DistributedDataParallel", _views(model)):
            wrapper = DistributedDataParallel(model, **arguments)
        settings.register_comm_hook(wrapper)
        return wrapper

    def holds_whole(self, model: torch.nn.Module) -> bool:
        """Return whether DDP wraps the model."""
        return ddp_of(model) is not None

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return DDP's `no_sync`, or a null context for a model that DDP does not wrap (a frozen one)."""
        wrapper = ddp_of(model)
        if wrapper is not None and wrapper.static_graph:  # its first pass decides which gradients come in all others
            _logger.warning_once(
                "A static graph averages gradients in every backward pass; got a pass that leaves them apart, as in "
                "gradient accumulation or no_sync(). They are averaged all the same. Set static_graph=False to save "
                "this exchange."
            )
        return nullcontext() if wrapper is None or wrapper.static_graph else wrapper.no_sync()

    @contextmanager
    def sync_next_backward(self, model: torch.nn.Module) -> Iterator[None]:
        """Make the next backward of a model average gradients although its forward ran under `no_sync`."""
        wrapper = ddp_of(model)
        if wrapper is None:
            yield
            return
        before = wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync
        wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = True
        # DDP decides in forward whether its reducer is armed (see `DistributedDataParallel.no_sync`): this arms it now.
        wrapper.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync = before

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return torch's `Join` over the given models and optimizers."""
        return Join([ddp_of(item) or item for item in joinables], enable=True, throw_on_early_termination=False)


class _Known:
    """What is known of a model since `prepare`: its wrapper, what that averages, and what it does not."""

    def __init__(
        self, model: torch.nn.Module, wrapper: DistributedDataParallel | None, parameters: list[torch.nn.Parameter]
    ) -> None:
        # A wrapper holds its model, so a strong reference to it would keep both alive forever.
        self.model, self._wrapper, self.was_wrapped = ref(model), wrapper and ref(wrapper), wrapper is not None
        self.frozen: list[ReferenceType[torch.nn.Parameter]] = []
        self.parameters = parameters
        # The wrapper waits on these nodes of autograd for gradients.
        self._nodes = [get_gradient_edge(each).node for each in parameters]
        self._places = [each.data_ptr() for each in parameters]

    def wrapper(self) -> DistributedDataParallel | None:
        """Return the wrapper, if there is one that lives."""
        return None if self._wrapper is None else self._wrapper()

    def cast(self) -> list[torch.nn.Parameter]:
        """Return the parameters with gradients on whose node nobody waits, as after a cast or a move."""
        places = [each.data_ptr() for each in self.parameters]
        if places == self._places:  # which takes 0.1 µs each, and torch's nodes 2 µs
            return []
        pairs = zip(self.parameters, self._nodes, strict=True)
        lost = [each for each, node in pairs if each.requires_grad and get_gradient_edge(each).node is not node]
        self._places = [] if lost else places
        return [each for each in lost if each.grad is not None]

    def unfrozen(self) -> list[torch.nn.Parameter]:
        """Return the parameters with gradients that were frozen in `prepare`."""
        alive = (each for reference in self.frozen if (each := reference()) is not None)
        return [each for each in alive if each.requires_grad and each.grad is not None]


def _views(model: torch.nn.Module) -> dict[str, PartView]:
    """Describe what DDP synchronizes: parameters that train, and buffers."""
    left_out = ignored_by_ddp(model)
    buffers = [(name, each) for name, each in model.named_buffers() if name not in left_out]
    return {
        name: PartView("lazy") if is_lazy(each) else PartView(str(each.dtype).removeprefix("torch."), tuple(each.shape))
        for name, each in (*trained_by_ddp(model).items(), *buffers)
    }
