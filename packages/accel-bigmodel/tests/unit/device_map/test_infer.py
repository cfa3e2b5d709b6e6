"""Device maps cover every tensor once, fit, and spill only when nothing else fits."""

import itertools
import random
import warnings
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from accel_bigmodel.device_map.balance import get_balanced_memory
from accel_bigmodel.device_map.check import clean_device_map, device_of
from accel_bigmodel.device_map.exact import units_of
from accel_bigmodel.device_map.infer import device_map_of, infer_auto_device_map, solve
from accel_bigmodel.device_map.tree import build_tree


class Block(nn.Module):
    """A block; its class may be kept whole."""


class Cell(nn.Module):
    """Another class of module."""


def random_model(seed: int, depth: int = 3, ties: bool = True) -> nn.Module:
    """Make a tree of linear layers with bare parameters, buffers beside submodules, and ties at any distance."""
    draw = random.Random(seed)

    def grow(level: int) -> nn.Module:
        if level == 0 or draw.random() < 0.3:
            return nn.Linear(draw.randint(1, 6), draw.randint(1, 6), bias=draw.random() < 0.7, device="meta")
        module = draw.choice((Block, Cell))()
        if draw.random() < 0.3:
            module.bare = nn.Parameter(torch.empty(draw.randint(1, 9), device="meta"))
        if draw.random() < 0.3:
            module.register_buffer("buffer", torch.empty(draw.randint(1, 9), device="meta"))
        for number in range(draw.randint(1, 3)):
            module.add_module(f"m{number}", grow(level - 1))
        return module

    model = Cell()
    for number in range(draw.randint(1, 4)):
        model.add_module(f"l{number}", grow(draw.randint(0, depth)))
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for _ in range(draw.randint(0, 2) if ties else 0):
        first, second = draw.choice(layers), draw.choice(layers)
        second.weight = first.weight
    return model


def random_limits(seed: int, total: int) -> dict[int | str, int]:
    """Choose limits of up to three accelerators and perhaps the CPU, around the model's size."""
    draw = random.Random(seed)
    limits: dict[int | str, int] = {
        number: int(total * draw.uniform(0.05, 0.9)) for number in range(draw.randint(0, 3))
    }
    if draw.random() < 0.7 or not limits:
        limits["cpu"] = int(total * draw.uniform(0.05, 1.2))
    return limits


def bytes_on(model: nn.Module, device_map: Mapping[str, int | str]) -> dict[int | str, int]:
    """Count every tensor once, on the device of its first name."""
    used: dict[int | str, int] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        device = device_of(name, device_map)
        assert device is not None, name
        assert isinstance(device, (int, str))
        used[device] = used.get(device, 0) + tensor.nbytes
    return used


@pytest.mark.filterwarnings("ignore:No accelerator has room for the buffers")
@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), keep_whole=st.booleans(), clean=st.booleans())
def test_every_tensor_is_placed_once_within_the_limits(seed: int, keep_whole: bool, clean: bool) -> None:
    """Random trees with bare tensors and ties: all covered, none over a limit, ties together, classes kept whole."""
    model = random_model(seed)
    total = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    limits = random_limits(seed, total)
    device_map = infer_auto_device_map(
        model, limits, no_split_module_classes=["Block"] if keep_whole else None, clean_result=clean
    )
    used = bytes_on(model, device_map)
    for device, count in used.items():
        assert device == "disk" or count <= limits[device]
    homes: dict[int, set[object]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        homes.setdefault(id(parameter), set()).add(device_of(name, device_map))
    assert all(len(devices) == 1 for devices in homes.values())
    names = list(device_map)
    for name in names:
        assert not any(other != name and name.startswith(f"{other}.") for other in names)
    if keep_whole:
        for name, module in model.named_modules():
            if isinstance(module, Block):
                inside = {device_of(f"{name}.{tensor}", device_map) for tensor, _ in module.named_parameters()}
                assert len(inside) <= 1


def brute_force_fits(sizes: list[int], limits: list[int]) -> bool:
    """Try every way to cut a row of units into as many pieces as there are devices."""
    count = len(sizes)
    for cuts in itertools.combinations_with_replacement(range(count + 1), len(limits) - 1):
        edges = (0, *cuts, count)
        if all(sum(sizes[a:b]) <= limit for a, b, limit in zip(edges, edges[1:], limits, strict=False)):
            return True
    return False


@pytest.mark.filterwarnings("ignore:No accelerator has room for the buffers")
@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_nothing_spills_while_a_contiguous_placement_fits(seed: int) -> None:
    """If brute force can cut the model over the accelerators, the CPU and the disk stay empty."""
    model = random_model(seed, depth=1)
    total = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    limits = random_limits(seed, total)
    sizes = [unit.size for unit in units_of(build_tree(model), ())]
    used = bytes_on(model, infer_auto_device_map(model, limits))
    fast = [limit for device, limit in limits.items() if device != "cpu"]
    if fast and brute_force_fits(sizes, fast):
        assert set(used) <= {device for device in limits if device != "cpu"}
    elif not fast and total <= limits["cpu"]:
        assert set(used) <= {"cpu"}


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_main_device_keeps_room_for_offloaded_layers(seed: int) -> None:
    """Where parts are offloaded, the first accelerator in use can take the largest of them back."""
    model = random_model(seed, ties=False)
    total = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    limits = random_limits(seed, total)
    device_map = device_map_of(solve(build_tree(model), limits, ()), clean=False)
    used = bytes_on(model, device_map)
    main = next((device for device in limits if device in used and device != "cpu"), None)
    away = [name for name, device in device_map.items() if device in ("cpu", "disk")]
    if main is None or not away:
        return
    largest = 0
    for name, module in model.named_modules():
        inside = any(not entry or name == entry or name.startswith(f"{entry}.") for entry in away)
        if inside and isinstance(module, nn.Linear):
            largest = max(largest, sum(p.nbytes for p in module.parameters()))
    assert used[main] + largest <= limits[main]


def test_a_buffer_beside_split_submodules_is_placed() -> None:
    """Splitting a module places its own buffers too, which Accelerate 1.15.0 leaves out."""
    model = Cell()
    model.block = Cell()
    model.block.register_buffer("scale", torch.zeros(1))
    model.block.first, model.block.second = nn.Linear(4, 4), nn.Linear(4, 4)
    device_map = infer_auto_device_map(model, {0: 160, 1: 200})
    assert set(bytes_on(model, device_map)) == {0, 1}


def test_memory_keys_may_be_numbers_in_text() -> None:
    """`max_memory` takes 0 and "0" for the first accelerator."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert infer_auto_device_map(model, {"0": "1KB"}) == infer_auto_device_map(model, {0: "1KB"}) == {"": 0}


def test_loading_in_a_narrow_dtype_needs_less_room() -> None:
    """Half precision halves what counts, and special dtypes decide for single tensors."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    assert set(infer_auto_device_map(model, {"cpu": 256}, dtype="float16").values()) == {"cpu"}
    special = {"0.weight": torch.float32, "1.weight": torch.int8}
    assert set(infer_auto_device_map(model, {"cpu": 320}, special_dtypes=special).values()) == {"cpu"}
    assert "disk" in infer_auto_device_map(model, {"cpu": 320}).values()


def test_an_empty_device_takes_a_smaller_part_on_request() -> None:
    """With `fallback_allocation` an accelerator that the first layer does not fit on gets a later one."""
    model = nn.Sequential(nn.Linear(20, 20, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(20, 20, bias=False))
    limits = {0: 1620, "cpu": 100_000}
    assert device_of("1", infer_auto_device_map(model, limits, fallback_allocation=True)) in (0, "cpu")
    assert infer_auto_device_map(model, {0: 1620, "cpu": 10_000}, fallback_allocation=True)["1"] == 0


class Buffered(nn.Module):
    """A layer with a weight of 20 bytes, and a buffer."""

    def __init__(self, buffer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5))
        self.register_buffer("table", torch.empty(buffer // 4))


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize(
    ("limits", "expected", "log"),
    [
        ({0: 260}, {"0": 0, "1": "cpu", "2": "cpu"}, ""),
        ({0: 100, 1: 250}, {"0": 1, "1": 1, "2": "cpu"}, "1 has no room for the largest offloaded layer"),
        ({0: 100}, {"": "cpu"}, "The model runs on the CPU"),
        ({0: 100, 1: 150}, {"": "cpu"}, "The model runs on the CPU"),
        ({0: 400}, {"": 0}, ""),
    ],
)
@pytest.mark.parametrize("fallback", [False, True])
def test_layers_are_placed_and_missing_room_is_named(
    limits: dict[int | str, int],
    expected: dict[str, int | str],
    log: str,
    offload_buffers: bool,
    fallback: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Accelerators that hold a layer are used, and buffers that fit on none are a warning unless they are offloaded."""
    model = nn.Sequential(Buffered(140), Buffered(60), Buffered(80))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed = infer_auto_device_map(
            model, {**limits, "cpu": 10_000}, offload_buffers=offload_buffers, fallback_allocation=fallback
        )
    assert dict(placed) == expected
    assert log in caplog.text
    warned = "cpu" in expected.values() and not offload_buffers
    assert [each.category for each in caught] == [UserWarning] * warned
    assert all("room for the buffers of the offloaded layers" in str(each.message) for each in caught)


def test_balanced_limits_share_evenly_or_spare_the_first() -> None:
    """Accelerators but the last get about an even share; with `low_zero` the first gets what the others cannot hold."""
    model = nn.Sequential(*[nn.Linear(10, 10, bias=False) for _ in range(6)])
    limits = get_balanced_memory(model, {0: 10_000, 1: 10_000, 2: 10_000})
    assert limits == {0: 1300, 1: 1300, 2: 10_000}
    placed = bytes_on(model, infer_auto_device_map(model, limits))
    assert max(placed.values()) - min(placed.values()) <= 800
    assert get_balanced_memory(model, {0: 10_000, 1: 10_000, 2: 10_000}, low_zero=True)[0] == 0
    assert get_balanced_memory(model, {0: 10_000, "cpu": 5}) == {0: 10_000, "cpu": 5}


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(".".join), st.integers(0, 1)))
def test_cleaning_a_map_changes_no_tensor(device_map: dict[str, int]) -> None:
    """A shortened map gives every name of the long one the same device."""
    leaves = {
        name: device for name, device in device_map.items() if not any(o.startswith(f"{name}.") for o in device_map)
    }
    short = clean_device_map(dict(leaves))
    assert {name: device_of(name, short) for name in leaves} == leaves
    assert len(short) <= len(leaves)
