"""One tensor of a module put on a device, and the state dict of a model whose tensors are spread out."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from accel_bigmodel.meta import as_parameter, own_attributes
from accel_bigmodel.offload.placeholders import is_placeholder
from accel_core.errors import CheckpointMismatchError, ConfigurationError, OffloadError
from accel_core.mesh.tensor import fill, spread_like
from accel_core.modules import packed
from accel_core.modules.sizes import as_dtype
from accel_core.modules.traversal import owner_of

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def normal_tensors() -> contextlib.AbstractContextManager[object]:
    """Return a context in which new tensors are normal ones, also inside `torch.inference_mode()`."""
    # An inference tensor has no version to tell writes by, and can never take part in a backward pass:
    # https://docs.pytorch.org/docs/stable/notes/autograd.html#inference-mode
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def in_normal_mode(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Have a function run so that the tensors it makes are normal ones, also inside `torch.inference_mode()`."""

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with normal_tensors():
            return function(*args, **kwargs)

    return run


TiedTensors = dict[int, dict[torch.device, torch.Tensor]]


def as_device(device: int | str | torch.device) -> torch.device:
    """Turn what a device map may hold into a torch device; an accelerator without an index is the current one."""
    found = torch.device(device)
    if found.index is None and found.type not in ("cpu", "meta", "mps") and torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and accelerator.type == found.type:
            return torch.device(found.type, torch.accelerator.current_device_index())
    if found.type == "cpu" and found.index is not None:  # torch counts cpu:0 as another device
        return torch.device("cpu")
    return found


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Return whether two devices are one, where an accelerator without an index is number 0."""
    if first_device.type != second_device.type:
        return False
    if first_device.type == "cpu":
        return True
    return (first_device.index or 0) == (second_device.index or 0)


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: int | str | torch.device,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: TiedTensors | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put a parameter or buffer of a module on a device, with another value if one is given.

    Args:
        module: The module that the name starts from.
        tensor_name: Dotted name of the parameter or buffer.
        device: Where it goes.
        value: Its new value; needed to come from the meta device. It is cast to `dtype`, or else to the dtype in place.
            Of a parameter that several processes hold together (a DTensor) each of them takes its part, where it is.
        dtype: The dtype of the new value; integers keep theirs.
        fp16_statistics: Row scales that go with packed 8-bit weights.
        tied_params_map: Copies on devices by the address of the original: a tied weight is copied once per device.
        non_blocking: Whether the copy may run behind the host's back.
        clear_cache: Accepted for older callers; no cache has to be emptied here.

    Raises:
        ConfigurationError: When the module has no such tensor, or no value is given for an empty one.
        CheckpointMismatchError: When the value has another shape.

    Examples:
        >>> layer = torch.nn.Linear(2, 2, device="meta")
        >>> set_module_tensor_to_device(layer, "bias", "cpu", value=torch.zeros(2))
        >>> layer.bias.device, layer.weight.device
        (device(type='cpu'), device(type='meta'))
    """
    owner, name = owner_of(module, tensor_name)
    is_buffer = name in owner._buffers
    store: dict[str, Any] = owner._buffers if is_buffer else owner._parameters
    if name not in store:
        raise ConfigurationError(
            f"{module} does not have a parameter or a buffer named {tensor_name}; got none under that name. Use a "
            "name of `named_parameters` or `named_buffers`."
        )
    old = store[name]
    if old is None:  # a bias, for instance, that the layer was made without
        return
    target = as_device(device)
    source = old if value is None else value
    copies = _copies_of(source, tied_params_map)
    found = None if copies is None else copies.get(target)
    # Tied, and loaded under another name; a view of the tied tensor has its address, and is another tensor.
    if found is not None and found.shape == source.shape and found.stride() == source.stride():
        store[name] = found
        return
    if value is None and old.device.type == "meta" and target.type != "meta":
        raise ConfigurationError(
            f"{tensor_name} is on the meta device, we need a `value` to put in on {target}; got no value. Pass the "
            "weight as `value`."
        )
    form = packed.find(old)
    if form is not None:
        store[name] = (
            form.move(old, target) if value is None else form.pack(old, value, target, statistics=fp16_statistics)
        )
        return
    if value is not None:
        if value.shape != old.shape:
            raise CheckpointMismatchError(
                f'Trying to set a tensor of shape {value.shape} in "{tensor_name}" (which has shape {old.shape}), this '
                "looks incorrect. Load a checkpoint of the same architecture."
            )
        value = _cast(value, old, as_dtype(dtype))
        if hasattr(old, "device_mesh"):
            _fill_shard(owner, name, old, value)
            return
    elif target == old.device:
        return
    new = _on_device(old if value is None else value, old, target, is_buffer, non_blocking)
    store[name] = new
    if copies is not None:
        copies[target] = new


def _copies_of(tensor: torch.Tensor, tied: TiedTensors | None) -> dict[torch.device, torch.Tensor] | None:
    """Return the copies on devices of a tied tensor; None for one that is not tied, or has no values."""
    if tied is None or tensor.is_meta:
        return None
    return tied.get(tensor.data_ptr())


def _fill_shard(owner: nn.Module, name: str, old: Any, value: torch.Tensor) -> None:
    """Fill a parameter that several processes hold together (torch's DTensor): this process's part of a whole value."""
    if old.is_meta:
        part = spread_like(value.to(old.device_mesh.device_type), old)
        owner.load_state_dict({name: part}, strict=False, assign=True)
    else:
        with torch.no_grad():
            fill(old, value)


def _cast(value: torch.Tensor, old: torch.Tensor, dtype: Any) -> torch.Tensor:
    if dtype is None:
        return value.to(old.dtype)
    return value.to(dtype) if value.is_floating_point() else value


def _on_device(
    source: torch.Tensor, old: torch.Tensor, device: torch.device, is_buffer: bool, non_blocking: bool
) -> torch.Tensor:
    """Return the tensor that takes the place of `old`: of its class, with its attributes."""
    if is_placeholder(source) and device.type == "meta":
        return source
    data = source.detach().to(device, non_blocking=non_blocking)
    if is_buffer:
        return data
    cls = nn.Parameter if is_placeholder(old) else type(old)
    requires_grad = old.requires_grad and (data.is_floating_point() or data.is_complex())
    made = as_parameter(cls, data, requires_grad)
    not_kept = ("weight_name", "block_name", "_is_param")
    attributes = {key: value for key, value in own_attributes(old).items() if key not in not_kept}
    if attributes:
        made.__dict__.update(attributes)
    return made


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make groups of names one tensor again, after placing gave each its own.

    Args:
        model: The model.
        tied_params: Groups of dotted names, as `find_tied_parameters` gives them. In each group the first name whose
            tensor is not empty is the one that the others get.

    Examples:
        >>> from accel import find_tied_parameters
        >>> model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False))
        >>> model[1].weight = model[0].weight
        >>> tied = find_tied_parameters(model)
        >>> model[1].weight = torch.nn.Parameter(torch.rand(8, 4))  # a load that gives each its own
        >>> retie_parameters(model, tied)
        >>> model[1].weight is model[0].weight
        True
    """
    for group in tied_params:
        owners = [owner_of(model, name) for name in group]
        present = [found for owner, leaf in owners if (found := owner._parameters.get(leaf)) is not None]
        kept = next((parameter for parameter in present if not parameter.is_meta), present[0] if present else None)
        for owner, leaf in owners:
            parameter = owner._parameters.get(leaf)
            if parameter is not kept and not is_placeholder(parameter) and not _waits_packed(parameter):
                owner._parameters[leaf] = kept


def _waits_packed(parameter: nn.Parameter | None) -> bool:
    """Return whether a parameter stands for packed bytes that are elsewhere."""
    return parameter is not None and parameter.is_meta and packed.find(parameter) is not None


@contextlib.contextmanager
def moved_tensors(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Have a module's own tensors on a device for a while; in-place changes are kept."""
    originals: dict[str, nn.Parameter] = {}
    for name, parameter in module._parameters.items():
        if parameter is None or parameter.device == device:
            continue
        if parameter.is_meta:
            raise OffloadError(
                f"An empty weight cannot be moved to a device; got {name!r} on the meta device, without a hook that "
                "knows its value. Load the model's weights first."
            )
        originals[name] = parameter
    for name in originals:
        set_module_tensor_to_device(module, name, device)
    try:
        yield
    finally:
        for name, original in originals.items():
            moved = module._parameters[name]
            if moved is not None and not moved.is_meta:
                original.data.copy_(moved.data)
            module._parameters[name] = original
