"""The hook that moves a module's inputs and weights to one device for its forward."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from accel_bigmodel.hooks.hook import ModelHook
from accel_bigmodel.hooks.residency import Residency, forget_loaded, residency_of
from accel_bigmodel.hooks.state import held_by_hooks
from accel_bigmodel.offload.placeholders import is_placeholder
from accel_bigmodel.offload.prefetch import Weights
from accel_bigmodel.offload.schedule import Schedule
from accel_bigmodel.placement import TiedTensors, as_device, set_module_tensor_to_device
from accel_core.comm.batch import find_device, send_to_device
from accel_core.modules import offloaded
from accel_core.modules.traversal import get_non_persistent_buffers, named_module_tensors

# All offloading imports this module, so core never saves an empty weight.
offloaded.holders.append(held_by_hooks)

_STAYS = frozenset({int, float, bool, str, bytes, type(None)})


def move_to(values: Any, device: torch.device, skip_keys: str | Sequence[str] | None = None) -> Any:
    """Return arguments or an output on a device; unchanged if nothing has to move."""
    kind = type(values)
    if kind is tuple or kind is list:
        items: Any = values
    elif kind is dict:
        items = values.values()
    elif isinstance(values, torch.Tensor):
        return values if values.device == device else values.to(device)
    else:
        items = (values,)
    # Looked at first: mostly nothing has to move, and the containers stay as they are.
    for item in items:
        if isinstance(item, torch.Tensor):
            if item.device != device:
                break
        elif type(item) not in _STAYS:
            break
    else:
        return values
    return send_to_device(values, device, skip_keys=[skip_keys] if isinstance(skip_keys, str) else skip_keys)


class _Running(threading.local):
    """What runs on a thread; copies and pickles begin without."""

    def __init__(self) -> None:
        self.origins: list[torch.device | None] = []  # where the inputs of running forwards came from, innermost last

    def __reduce__(self) -> tuple[type["_Running"], tuple[()]]:
        """Leave all out."""
        return _Running, ()


class AlignDevicesHook(ModelHook):
    """Moves inputs and weights to one device before a forward, and offloads the weights after it.

    Every argument is kept under its own name, so that a hook can be built again from its attributes. What belongs to
    one module is kept with that module: one hook may serve several.

    Args:
        execution_device: Where inputs and weights have to be; None leaves inputs where they are.
        offload: Whether the weights are away between forwards.
        io_same_device: Whether outputs go back to the device that the first input came from.
        weights_map: Offloaded weights by name in the module; by default the weights the module has are kept on the CPU.
            It is read again whenever weights are loaded.
        offload_buffers: Whether buffers are away too.
        place_submodules: Whether the tensors of submodules belong to this hook as well.
        skip_keys: Keyword arguments and output keys that are not moved.
        tied_params_map: Copies on devices by the address of the original; a tied weight is copied once per device.

    Examples:
        >>> from accel import add_hook_to_module
        >>> hook = AlignDevicesHook(execution_device="cpu", offload=True)
        >>> layer = add_hook_to_module(torch.nn.Linear(2, 2), hook)
        >>> layer.weight.device
        device(type='meta')
        >>> layer(torch.rand(1, 2)).device
        device(type='cpu')
    """

    is_prefetched = True
    """Whether the weights may be sent for before their module runs."""

    _pre_is_overridden = False
    _post_is_overridden = False

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Record which methods a subclass overrides; those are called around a forward instead of the class's own."""
        super().__init_subclass__(**kwargs)
        cls._pre_is_overridden = cls.pre_forward is not AlignDevicesHook.pre_forward
        cls._post_is_overridden = cls.post_forward is not AlignDevicesHook.post_forward

    def __init__(
        self,
        execution_device: int | str | torch.device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, torch.Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: TiedTensors | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self._target: tuple[Any, torch.device | None] = (None, None)
        # At the root of a model with prefetched weights: notified when a pass is over.
        self._schedules: tuple[Schedule[Weights], ...] = ()
        self._running = _Running()

    def __repr__(self) -> str:
        """Name the device and what the hook does there."""
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave the schedules out of copies and pickles: a copy loads its weights when it needs them."""
        return {**self.__dict__, "_schedules": ()}

    @property
    def moves_weights(self) -> bool:
        """Whether the weights are away between forwards, or those of modules below are prefetched."""
        return self.offload or bool(self._schedules)

    @property
    def device(self) -> torch.device | None:
        """The execution device as torch knows it; None when inputs stay where they are."""
        asked = self.execution_device
        known, device = self._target
        if asked is not known:
            device = None if asked is None else as_device(asked)
            self._target = (asked, device)
        return device

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the module's tensors to the execution device, or offload them."""
        device = self.device
        if not self.offload:
            if device is not None:
                for name, tensor in list(named_module_tensors(module, recurse=self.place_submodules)):
                    # An earlier hook loads it: a module may have two names, with two devices in a map.
                    if is_placeholder(tensor):
                        continue
                    set_module_tensor_to_device(module, name, device, tied_params_map=self.tied_params_map)
            return module
        self.original_devices = {
            name: tensor.device for name, tensor in named_module_tensors(module, recurse=self.place_submodules)
        }
        residency = residency_of(module, self)
        if residency is None:
            residency = Residency(module, self)
        residency.offload()
        if device is not None:
            staying = (
                get_non_persistent_buffers(module, recurse=self.place_submodules, fqns=True)
                if self.offload_buffers
                else {name for name, _ in module.named_buffers(recurse=self.place_submodules)}
            )
            for name in staying:
                set_module_tensor_to_device(module, name, device, tied_params_map=self.tied_params_map)
        return module

    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Load the module's weights, to be read and written until `post_forward`, and move its inputs."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        residency = self._residency(module)
        if residency is not None:
            residency.hold()
        return self.move_inputs(module, args, kwargs)

    def enter_forward(
        self, module: nn.Module, *args: object, **kwargs: object
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Load the module's weights for its forward, which reads them, and move its inputs."""
        overridden = self._pre_is_overridden
        residency = None
        if self.io_same_device and cast(Any, torch.jit).is_tracing():  # once a pass: at the root of a model
            forget_loaded(module)
        if self.offload:
            residency = residency_of(module, self) or self._residency(module)
        if residency is not None:
            residency.enter(writable=overridden)
        try:
            if overridden:  # what a subclass does before a forward; the weights are loaded already
                args, kwargs = self.pre_forward(module, *args, **kwargs)
            else:
                if self.io_same_device:
                    self.input_device = find_device([args, kwargs])
                args, kwargs = self.move_inputs(module, args, kwargs)
        except BaseException:
            if residency is not None:
                residency.leave()
            # Nothing else does it: `abort_forward` is only called for forwards that were entered.
            self._end_pass()
            raise
        if self.io_same_device:
            self._running.origins.append(self.input_device)
        return args, kwargs

    def _residency(self, module: nn.Module) -> Residency | None:
        """Return the residency of a module's weights; None when this hook offloads nothing."""
        if not self.offload:
            return None
        if residency_of(module, self) is None:  # the hook was set without `add_hook_to_module`
            self.init_hook(module)
        return residency_of(module, self)

    def move_inputs(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs on the execution device.

        Args:
            module: The module they are for.
            args: Positional arguments.
            kwargs: Keyword arguments.

        Returns:
            Both, moved where they have to be.
        """
        device = self.device
        if device is None:
            return args, kwargs
        if args:
            args = move_to(args, device)
        if kwargs:
            kwargs = move_to(kwargs, device, self.skip_keys)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: object) -> Any:
        """Offload the weights that `pre_forward` loaded, and move the output back."""
        residency = residency_of(module, self) if self.offload else None
        if residency is not None:
            residency.release()
        return self._sent_back(output, self.input_device) if self.io_same_device else output

    def leave_forward(self, module: nn.Module, output: object) -> Any:
        """Offload the module's weights after the last of its forwards, and move the output back."""
        if not self.io_same_device and not self._post_is_overridden and not self._schedules:
            residency = residency_of(module, self) if self.offload else None
            if residency is not None:
                residency.leave()
            return output
        try:
            if self.io_same_device:
                self.input_device = self._running.origins[-1]
            if self._post_is_overridden:
                return self.post_forward(module, output)
            return self._sent_back(output, self.input_device)
        finally:
            self._end(module)

    def _sent_back(self, output: object, device: torch.device | None) -> Any:
        return output if device is None else move_to(output, device, self.skip_keys)

    def abort_forward(self, module: nn.Module) -> None:
        """Offload the module's weights after a forward that raised."""
        self._end(module)

    def _end(self, module: nn.Module) -> None:
        if self.io_same_device:
            self._running.origins.pop()
        try:
            if self.offload:
                residency = residency_of(module, self)
                if residency is not None:
                    residency.leave()
        finally:
            if self._schedules:
                self._end_pass()

    def _end_pass(self) -> None:
        for schedule in self._schedules:
            schedule.end_pass()

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Put the module's original tensors back, on their original devices."""
        if self.offload:
            residency = residency_of(module, self)
            if residency is not None:
                residency.restore()
        return module
