"""Maps chosen by a word, and limits that no map can keep."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch
from accel_bigmodel.device_map.balance import chosen_device_map
from accel_bigmodel.device_map.check import device_of
from accel_bigmodel.device_map.infer import infer_auto_device_map
from accel_core.errors import DeviceMapError

WORDS = ["auto", "balanced", "balanced_low_0", "sequential"]


def layers(*widths: int) -> nn.Module:
    """Make empty layers of so many floats each."""
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(width, 1, bias=False) for width in widths])


@pytest.mark.parametrize("word", WORDS)
def test_limits_below_the_largest_block_are_an_error(word: str, tmp_path: Path) -> None:
    """Accelerators alone, none of which can compute the largest block: it is named with both sizes; nothing changed."""
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(16, 16))
    file = tmp_path / "model.safetensors"
    save_file(nn.Sequential(nn.Linear(4, 4), nn.Linear(16, 16)).state_dict(), file)
    with pytest.raises(DeviceMapError, match=r"'1' of 1\.06 KiB, for limits of 0: 600 B, 1: 500 B\..*name 'cpu'"):
        load_checkpoint_and_dispatch(model, file, device_map=word, max_memory={0: 600, 1: 500})
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not {"hf_device_map", "_hf_hook"} & set(model.__dict__)


@pytest.mark.parametrize("slower", ["cpu", "disk"])
def test_a_block_may_go_where_the_limits_say_so(slower: str, caplog: pytest.LogCaptureFixture) -> None:
    """With the CPU or the disk named in the limits, a model that no accelerator can compute runs on the CPU."""
    assert chosen_device_map(layers(100, 100), "auto", {0: 300, slower: 1000}) == {"": slower}
    assert "'0' of 400 B, for limits of 0: 300 B" in caplog.text
    assert "runs on the CPU" in caplog.text
    caplog.clear()
    assert infer_auto_device_map(layers(100, 100), {0: 300}) == {"": "disk"}, "which never refuses"
    assert "runs on the CPU" in caplog.text


@pytest.mark.parametrize("limits", [{"cpu": 500, "disk": 700}, {0: 1000, "cpu": 100, "disk": 50}])
def test_a_limit_of_the_disk_is_kept(limits: dict[int | str, int | str]) -> None:
    """Where the disk has a limit too, a model that fits nowhere is an error with its bytes and its largest part."""
    with pytest.raises(DeviceMapError, match=r"does not fit.*1\.17 KiB of weights.*'1' of 800 B.*disk: "):
        infer_auto_device_map(layers(100, 200), limits)


def test_a_placement_within_the_disk_limit_is_found() -> None:
    """Filling the CPU first would leave the disk too small; the order of the model need not be broken for it."""
    found = infer_auto_device_map(layers(100, 100, 100), {"cpu": 900, "disk": 400})
    assert found == {"0": "cpu", "1": "cpu", "2": "disk"}


@pytest.mark.parametrize("word", WORDS)
def test_an_even_share_is_given_up_before_anything_spills(word: str) -> None:
    """A block above an even share goes to the accelerator that can take it, not to the disk."""
    model = layers(225, 10, 10, 10, 10)
    limits: dict[int | str, int | str] = {0: 1000, 1: 400}
    assert "disk" in infer_auto_device_map(model, {0: 850, 1: 400}).values()
    found = chosen_device_map(model, word, limits)
    assert set(found.values()) <= {0, 1}
    assert device_of("0", found) == 0
