"""A folder of offloaded weights is used again for the weights that it holds, and for no others."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_bigmodel import disk_offload, dispatch_model, init_empty_weights
from accel_core.errors import OffloadError

CPU = torch.device("cpu")
X = torch.arange(8.0).reshape(2, 4) / 8


def make(seed: int) -> nn.Module:
    """Two layers around statistics."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).eval()


def _disk(model: nn.Module, folder: Path) -> nn.Module:
    return disk_offload(model, folder, CPU)


def _with_buffers(model: nn.Module, folder: Path) -> nn.Module:
    return disk_offload(model, folder, CPU, offload_buffers=True)


def _map(model: nn.Module, folder: Path) -> nn.Module:
    return dispatch_model(model, {"0": "cpu", "1": "disk", "2": "disk"}, offload_dir=folder)


def _contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.fixture(params=[_disk, _with_buffers, _map])
def place(request: pytest.FixtureRequest) -> Callable[[nn.Module, Path], nn.Module]:
    """A way of putting weights into a folder."""
    found: Callable[[nn.Module, Path], nn.Module] = request.param
    return found


def test_the_folder_of_the_same_model_is_used_again(
    place: Callable[[nn.Module, Path], nn.Module], tmp_path: Path
) -> None:
    """Nothing is written a second time, for a model in memory, in another dtype, or empty."""
    plain = make(0)
    place(copy.deepcopy(plain), tmp_path)
    before = _contents(tmp_path)
    assert torch.equal(place(copy.deepcopy(plain), tmp_path)(X), plain(X))
    assert torch.equal(place(copy.deepcopy(plain).half(), tmp_path)(X.half()), copy.deepcopy(plain).half()(X.half()))
    assert _contents(tmp_path) == before


def test_an_empty_model_takes_the_weights_of_the_folder(tmp_path: Path) -> None:
    """Without weights of its own there is nothing that could differ."""
    plain = make(0)
    _with_buffers(copy.deepcopy(plain), tmp_path)
    with init_empty_weights(include_buffers=True):
        empty = make(1)
    assert torch.equal(_with_buffers(empty, tmp_path)(X), plain(X))


@pytest.mark.parametrize("change", ["another model", "one bit", "more layers"])
def test_the_folder_of_another_model_is_refused(
    change: str, place: Callable[[nn.Module, Path], nn.Module], tmp_path: Path
) -> None:
    """Weights that differ, be it in one bit, or are missing: model and folder are named and left as they were."""
    place(make(0), tmp_path)
    other = make(1 if change == "another model" else 0)
    message = r"holds other weights than the model; got .*, where '\d\.\w+' differs"
    with torch.no_grad():
        if change == "one bit":
            other[2].bias[3] = torch.nextafter(other[2].bias[3], torch.tensor(9.0))  # type: ignore[index, union-attr]
            message = "where '2.bias' differs"
        elif change == "more layers":
            other[2] = nn.Sequential(other[2], nn.Linear(4, 4))  # type: ignore[index, operator]
            message = r"belongs to another model; got .* without 2\.0\.weight, 2\.0\.bias, 2\.1\.weight, 2\.1\.bias"
    expected, before = other(X), _contents(tmp_path)
    with pytest.raises(OffloadError, match=message):
        place(other, tmp_path)
    assert not any("_hf_hook" in module.__dict__ for module in other.modules())
    assert torch.equal(other(X), expected)
    assert _contents(tmp_path) == before
