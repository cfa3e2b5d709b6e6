"""The door of the cache of experts: which ones come one by one, where the rest of the model goes, and their hooks."""

from collections.abc import Mapping, Sequence

from torch import nn

from accel_bigmodel.device_map.balance import chosen_device_map
from accel_bigmodel.device_map.check import device_of
from accel_bigmodel.device_map.experts import room_for_cache, with_experts_on_disk, without
from accel_bigmodel.device_map.placement import Placement
from accel_bigmodel.experts.cache import ExpertCache
from accel_bigmodel.experts.listed import are_listed, attach_listed
from accel_bigmodel.experts.stacked import attach_stacked, loadable_per_expert, look_ahead
from accel_bigmodel.memory import get_max_memory
from accel_bigmodel.offload.store import OffloadedWeightsLoader
from accel_bigmodel.placement import as_device
from accel_bigmodel.sizes import Dtype
from accel_core._records import record
from accel_core.errors import ConfigurationError
from accel_core.modules import packed
from accel_core.modules.experts import number_of_experts
from accel_core.modules.sizes import as_dtype, tensor_bytes


def _experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model whose experts can come one by one, by name."""
    modules = model.named_modules()
    return {name: module for name, module in modules if loadable_per_expert(module) or are_listed(name, module)}


@record(frozen=True)
class CachedExperts:
    """The modules of experts of a model that come one by one, by name, and the cache that they come through."""

    modules: Mapping[str, nn.Module]
    cache: ExpertCache | None = None
    looks_ahead: bool = False

    @classmethod
    def of(
        cls, placement: Placement, size: int | str | None, looks_ahead: bool, dtype: Dtype | None = None
    ) -> "CachedExperts":
        """Find them; refuse a model without any, a cache with no room for one, and guesses without a cache."""
        if size is None:
            if looks_ahead:
                raise ConfigurationError(
                    "Guessed experts are fetched into a cache; got expert_lookahead=True without expert_cache. Pass "
                    "its size, or leave expert_lookahead out."
                )
            return cls({})
        found = _experts_of(placement.model)
        away = {name: module for name, module in found.items() if device_of(name, placement.away)}
        if not away:
            what = "no experts were found" if not found else f"the experts {', '.join(found)} stay in memory"
            raise ConfigurationError(
                f"A cache of experts serves a mixture whose experts are on the CPU or the disk; got "
                f"expert_cache={size!r} and {type(placement.model).__name__}, in which {what}. Leave expert_cache out, "
                "or give the experts another place in device_map. Experts are a module with num_experts, with "
                "parameters of the shape (num_experts, ...), that is called with tokens, expert numbers and weights, "
                "or a list of modules with the name experts."
            )
        cache = ExpertCache(0, max(_bytes_of_one(module, dtype) for module in away.values()))
        cache.resize(size)
        return cls(away, cache, looks_ahead)

    def attach(
        self, placement: Placement, store: OffloadedWeightsLoader | None, skip_keys: str | list[str] | None
    ) -> None:
        """Put hooks on the experts, before the rest of the model gets any."""
        if self.cache is None or store is None:
            return
        for name, module in self.modules.items():
            device = as_device(device_of(name, placement.compute))  # type: ignore[arg-type]
            if are_listed(name, module):
                attach_listed(module, name, device, store, self.cache, skip_keys)
            else:
                attach_stacked(module, name, device, store, self.cache)
        if self.looks_ahead:
            look_ahead(placement.model, list(self.modules))

    @property
    def shown(self) -> dict[str, object]:
        """What the model shows of the cache."""
        return {} if self.cache is None else {"expert_cache": self.cache, "expert_report": self.cache.report}


def _bytes_of_one(module: nn.Module, dtype: Dtype | None) -> int:
    if isinstance(module, nn.ModuleList):
        return max(sum(_bytes_of(each, dtype) for each in one.parameters()) for one in module)
    whole = sum(_bytes_of(each, dtype) for each in module._parameters.values() if each is not None)
    return int(whole // number_of_experts(module))


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
    experts = _experts_of(model)
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
