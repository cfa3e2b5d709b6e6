"""A device map with its reasons: what each device holds, what it keeps free, and why."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from accel_bigmodel.device_map.balance import get_balanced_memory
from accel_bigmodel.device_map.check import clean_device_map
from accel_bigmodel.device_map.experts import (
    room_for_cache,
    with_experts_on_disk,
    without,
)
from accel_bigmodel.device_map.infer import check_accelerators, solve, solve_evenly
from accel_bigmodel.device_map.tree import build_tree, no_split_classes
from accel_bigmodel.memory import get_max_memory
from accel_bigmodel.sizes import Dtype, compute_module_sizes, whole_classes
from accel_core._records import record
from accel_core.errors import ConfigurationError, DeviceMapError
from accel_core.modules.experts import are_stacked
from accel_core.modules.sizes import as_dtype, convert_file_size_to_int, written_size
from accel_plan.drawing import draw_bars
from accel_plan.experts import ExpertShare
from accel_plan.headroom import Workload, activation_bytes
from accel_plan.output import draw_table

Device = int | str
Headroom = int | float | str | Workload | None


@record(frozen=True)
class Part:
    """A part of the model in its place."""

    name: str
    device: Device
    nbytes: int  # of parameters and buffers; tied tensors count at their first name


@record(frozen=True)
class DeviceShare:
    """What a device's bytes are for.

    Attributes:
        limit: Bytes it may hold; None for a disk without a limit.
        weights: Bytes of the parts placed on it.
        reserve: Bytes kept for the largest offloaded layer, which comes here to compute.
        headroom: Bytes kept for activations and caches.
    """

    device: Device
    limit: int | None
    weights: int
    reserve: int
    headroom: int

    @property
    def free(self) -> int | None:
        """Bytes that are left; None without a limit."""
        return None if self.limit is None else self.limit - self.weights - self.reserve - self.headroom


@record(frozen=True)
class Plan:
    """A placement of a model, with an account of every device.

    Attributes:
        parts: The parts, in the model's order of placing.
        shares: The devices.
        main: The device that offloaded parts compute on.
        experts: What experts cost that come one by one; None without a cache of them.
    """

    parts: tuple[Part, ...]
    shares: tuple[DeviceShare, ...]
    main: Device
    experts: ExpertShare | None = None

    def __repr__(self) -> str:
        held = ", ".join(f"{share.device}: {written_size(share.weights)}" for share in self.shares)
        return f"Plan({len(self.parts)} parts of {written_size(self.nbytes)}; {held})"

    def _repr_html_(self) -> str:
        """Draw the plan, for notebooks."""
        return self.svg()

    @property
    def device_map(self) -> dict[str, Device]:
        """The map for `dispatch_model`, as short as it can be."""
        return clean_device_map({part.name: part.device for part in self.parts})

    @property
    def nbytes(self) -> int:
        """Bytes of the whole model."""
        return sum(part.nbytes for part in self.parts)

    def explain(self, device: Device) -> str:
        """Return in words which parts a device holds, and what its bytes are for, one sentence per purpose.

        Raises:
            ConfigurationError: When the plan has no such device.
        """
        share = next((share for share in self.shares if share.device == device), None)
        if share is None:
            known = [share.device for share in self.shares]
            raise ConfigurationError(f"The plan has no device {device!r}; it has {known}. Ask for one of these.")
        count = sum(part.device == device for part in self.parts)
        held = f"{count} {'part' if count == 1 else 'parts'} of {written_size(share.weights)}"
        words = [f"{device} holds {held}: {self._names(device)}." if count else f"{device} holds nothing."]
        if share.reserve:
            words.append(f"{written_size(share.reserve)} are kept for the largest offloaded layer.")
        if share.headroom:
            words.append(f"{written_size(share.headroom)} are kept for activations and caches.")
        if share.free is not None:
            words.append(f"{written_size(share.free)} of {written_size(share.limit or 0)} are left.")
        if device == "disk" and self.main == "cpu":
            words.append("The CPU computes with them as pages of the page cache, which no limit here counts.")
        return " ".join(words)

    def table(self) -> str:
        """Draw the devices as a table of text: device, parts, weights, reserve, headroom, free, limit."""
        rows = [["device", "parts", "weights", "reserve", "headroom", "free", "limit"]]
        for share in self.shares:
            count = sum(part.device == share.device for part in self.parts)
            cells = (share.weights, share.reserve, share.headroom, share.free, share.limit)
            written = ("-" if cell is None else written_size(cell) for cell in cells)
            rows.append([str(share.device), str(count), *written])
        return draw_table(rows)

    def svg(self) -> str:
        """Draw the devices as the bars of an SVG document, all to one scale."""
        bars = {}
        for share in self.shares:
            parts = {"weights": share.weights, "reserve": share.reserve, "headroom": share.headroom}
            parts["free"] = share.free or 0
            label = f"{share.device}: {self._names(share.device)}"
            bars[label] = {purpose: count for purpose, count in parts.items() if count > 0}
        return draw_bars(f"{written_size(self.nbytes)} of weights by device", bars)

    def _names(self, device: Device) -> str:
        """Name what a device holds, parts that are numbered one after the other as one: "embed, layers.0-3"."""
        runs, last = dict[str, str](), ""
        for name in (name for name, target in self.device_map.items() if target == device):
            before, _, number = name.rpartition(".")
            if number.isdecimal() and runs and last == f"{before}.{int(number) - 1}".removeprefix("."):
                runs[next(reversed(runs))] = f"-{number}"
            else:
                runs[name or "the whole model"] = ""
            last = name
        return ", ".join(first + end for first, end in runs.items())

    def to_json(self) -> str:
        """Write the plan as JSON, which `from_json` reads."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read a plan.

        Raises:
            ConfigurationError: When the text is not a plan.
        """
        try:
            content: Any = json.loads(text)
            parts = tuple(Part(**part) for part in content["parts"])
            shares = tuple(DeviceShare(**share) for share in content["shares"])
            experts = content.get("experts")
            found = cls(parts, shares, content["main"], None if experts is None else ExpertShare(**experts))
            found.svg()  # reads every number
        except (ArithmeticError, ValueError, KeyError, TypeError, RecursionError) as failure:
            raise ConfigurationError(
                f"This is not a plan; got {type(failure).__name__}: {failure}. Write it with `Plan.to_json`."
            ) from failure
        return found


def plan_device_map(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    *,
    headroom: Headroom = None,
    no_split_module_classes: Sequence[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    balanced: bool = False,
    low_zero: bool = False,
    expert_cache: int | str | None = None,
) -> Plan:
    """Decide which device holds which part of a model, and account for every byte.

    Args:
        model: The model, which may be empty.
        max_memory: Bytes or written sizes by device; by default what is free.
        headroom: What every accelerator keeps free for the run: bytes, a written size, a fraction of its limit, or a
            `Workload` whose forward is traced on the meta device. Without accelerators the CPU keeps it.
        no_split_module_classes: Class names of modules that stay on one device; by default the model's own list.
        dtype: The dtype the weights will be loaded in.
        special_dtypes: Dtypes of single tensors by name.
        balanced: Whether the accelerators share evenly.
        low_zero: With `balanced`, whether the first gets as little as possible.
        expert_cache: Bytes or a written size of a cache of experts: they wait on the disk and come one by one, dense
            parts are placed first, and the plan says what a token costs.

    Returns:
        The plan.

    Raises:
        ConfigurationError: When `expert_cache` is larger than its device, or smaller than one expert, or the model has
            no experts.
        DeviceMapError: When the headroom leaves a device nothing, no accelerator has room for the largest layer, or the
            model does not fit at all.

    Examples:
        >>> plan = plan_device_map(torch.nn.Linear(8, 8), {"cpu": "1KiB"})
        >>> plan.device_map
        {'': 'cpu'}
    """
    experts = {} if expert_cache is None else {name: each for name, each in model.named_modules() if are_stacked(each)}
    if expert_cache is not None and not experts:
        raise ConfigurationError(
            f"A cache of experts serves a mixture; got expert_cache={expert_cache!r} and {type(model).__name__}, in "
            "which no experts were found. Leave expert_cache out; or, if a checkpoint is planned from its headers "
            "alone, name its model."
        )
    limits = get_max_memory(max_memory)
    if no_split_module_classes is None:
        no_split_module_classes = whole_classes(model)
    no_split = no_split_classes(no_split_module_classes)
    fast = [device for device in limits if device not in ("cpu", "disk")]
    kept = _kept(model, headroom, {device: limits[device] for device in fast or limits if device != "disk"}, dtype)
    share_of_experts, sizes = None, dict[str, int]()
    if expert_cache is not None:
        sizes = compute_module_sizes(model, dtype, special_dtypes)
        share_of_experts = ExpertShare.of(model, experts, expert_cache, sizes)
        for device, count in room_for_cache(expert_cache, limits).items():
            kept[device] = kept.get(device, 0) + count
    left = {device: limit - kept.get(device, 0) for device, limit in limits.items()}
    for device, room in left.items():
        if room <= 0 < kept.get(device, 0):
            raise DeviceMapError(
                f"The headroom leaves no room for weights; got {written_size(kept[device])} of headroom on "
                f"{device!r}, which has {written_size(limits[device])}. Lower the headroom or raise `max_memory`."
            )
    with without(experts.values()):
        tree = build_tree(model, dtype, special_dtypes, no_split)
        if balanced:
            share = get_balanced_memory(model, left, list(no_split), dtype, special_dtypes, low_zero)
            solution = solve_evenly(tree, left, share, no_split)
        else:
            solution = solve(tree, left, no_split)
    check_accelerators(solution, "Raise `max_memory`, lower the headroom, or let modules be split.")
    parts: list[Part] = []
    used = dict.fromkeys(limits, 0)
    for node, device in solution.placed:
        for name, place in with_experts_on_disk(model, node.name, device, experts):
            whole = name == node.name and name not in experts
            parts.append(Part(name, place, node.size if whole else sizes.get(name, 0)))
            used[place] = used.get(place, 0) + parts[-1].nbytes
    reserve = solution.largest_offloaded if solution.main in fast else 0
    shares = [
        DeviceShare(device, limits.get(device), count, reserve if device == solution.main else 0, kept.get(device, 0))
        for device, count in used.items()
    ]
    return Plan(tuple(parts), tuple(shares), solution.main, share_of_experts)


def _kept(model: nn.Module, headroom: Headroom, limits: Mapping[Device, int], dtype: Dtype | None) -> dict[Device, int]:
    if headroom is None:
        return {}
    if isinstance(headroom, Workload):
        wanted = as_dtype(dtype)
        count = activation_bytes(model, headroom, wanted if isinstance(wanted, torch.dtype) else None)
        return dict.fromkeys(limits, count)
    if isinstance(headroom, float):
        if not 0 <= headroom < 1:
            raise ConfigurationError(
                f"A headroom given as a fraction must be between 0 and 1; got {headroom}. Pass bytes as an integer."
            )
        return {device: int(limit * headroom) for device, limit in limits.items()}
    return dict.fromkeys(limits, convert_file_size_to_int(headroom))
