"""Which experts of a model come to the device one by one, and where the rest of the model goes."""

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from accel_bigmodel.device_map.balanced import chosen_device_map
from accel_bigmodel.device_map.experts import room_for_cache, with_experts_on_disk, without
from accel_bigmodel.hooks.experts import can_come_alone
from accel_bigmodel.hooks.listed import are_listed
from accel_bigmodel.memory import get_max_memory
from accel_bigmodel.offload.experts import ExpertCache
from accel_bigmodel.sizes import Dtype
from accel_core.errors import ConfigurationError
from accel_core.modules import packed
from accel_core.modules.sizes import as_dtype, tensor_bytes

__all__ = ["device_map_with_cache", "experts_of", "make_cache"]


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model whose experts can come one by one, by name."""
    modules = model.named_modules()
    return {name: module for name, module in modules if can_come_alone(module) or are_listed(name, module)}


def make_cache(model: nn.Module, away: Collection[str], size: int | str, dtype: Dtype | None = None) -> ExpertCache:
    """Return a cache for a model's experts that are away; refuse it if none are, or if it has no room for one."""
    found = experts_of(model)
    if not found or not away:
        what = "no experts were found" if not found else f"the experts {', '.join(found)} stay in memory"
        raise ConfigurationError(
            f"A cache of experts serves a mixture whose experts are on the CPU or the disk; got expert_cache={size!r} "
            f"and {type(model).__name__}, in which {what}. Leave expert_cache out, or give the experts another place "
            "in device_map. Experts are a module with num_experts, with parameters of the shape (num_experts, ...), "
            "that is called with tokens, expert numbers and weights, or a list of modules with the name experts."
        )
    cache = ExpertCache(0, max(_bytes_of_one(found[name], dtype) for name in away))
    cache.resize(size)
    return cache


def _bytes_of_one(module: nn.Module, dtype: Dtype | None) -> int:
    if isinstance(module, nn.ModuleList):
        return max(sum(_bytes_of(each, dtype) for each in one.parameters()) for one in module)
    whole = sum(_bytes_of(each, dtype) for each in module._parameters.values() if each is not None)
    count: int = module.num_experts  # type: ignore[assignment]
    return int(whole // count)


def _bytes_of(parameter: nn.Parameter, dtype: Dtype | None) -> int:
    form = packed.find(parameter)
    return tensor_bytes(parameter, as_dtype(dtype)) if form is None else form.nbytes(parameter)


def device_map_with_cache(
    model: nn.Module,
    size: int | str,
    strategy: str,
    max_memory: Mapping[int | str, int | str] | None,
    no_split_module_classes: Sequence[str] | None,
    dtype: Dtype | None,
    offload_buffers: bool,
) -> dict[str, int | str]:
    """Choose a device map of the dense parts, which leaves room for a cache; the experts are on the disk.

    Raises:
        ConfigurationError: The cache is larger than the limit of its device.
        DeviceMapError: As `chosen_device_map` does.
    """
    experts = experts_of(model)
    limits = get_max_memory(max_memory)
    kept = room_for_cache(size, limits) if experts else {}
    if kept:
        left = {device: limits[device] - count for device, count in kept.items()}
        max_memory = {**(limits if max_memory is None else max_memory), **left}
    with without(experts.values()):
        chosen = chosen_device_map(model, strategy, max_memory, no_split_module_classes, dtype, offload_buffers)
    devices: dict[str, int | str] = {}
    for name, device in chosen.items():
        devices.update(with_experts_on_disk(model, name, device, experts))
    return devices
