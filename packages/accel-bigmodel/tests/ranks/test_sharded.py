"""Checkpoints loaded into models whose parameters two processes hold together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accel_bigmodel import load_checkpoint_in_model, offload_weight
from accel_core.errors import CollectiveError, OffloadError
from accel_core.process.world import ensure
from accel_testing import requires, world


def model() -> nn.Module:
    """Make the same model on every rank; its rows do not divide evenly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))


def sharded_model(device: str) -> nn.Module:
    """Make the model in parts, its weights not those of `model`."""
    with torch.device(device):
        sharded = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    mesh = init_device_mesh("cpu", (2,))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    return sharded


@world(2)
@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("reads", ["each", "the first"])
def test_each_process_takes_its_part(device: str, reads: str, tmp_path: Path) -> None:
    """Whole tensors, read by every process or sent by the first, end up sharded and equal."""
    here = ensure()
    plain = model()
    file = tmp_path / (f"{here.rank}.safetensors" if reads == "each" else "0.safetensors")
    if here.is_main or reads == "each":
        save_file(plain.state_dict(), file)
    sharded = sharded_model(device)
    keys = load_checkpoint_in_model(sharded, file, strict=True, broadcast_from_rank0=reads == "the first")
    assert keys == ([], [])
    for name, value in plain.state_dict().items():
        assert torch.equal(sharded.get_parameter(name).full_tensor(), value)
        assert sharded.get_parameter(name).to_local().shape != value.shape


@requires("torch:2.8")
@world(2)
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_what_was_loaded_in_parts_trains(device: str, tmp_path: Path) -> None:
    """The model computes what the whole one does, and every parameter gets a gradient."""
    plain = model()
    file = tmp_path / f"{ensure().rank}.safetensors"
    save_file(plain.state_dict(), file)
    sharded = sharded_model(device)
    load_checkpoint_in_model(sharded, file, strict=True)
    x = torch.ones(2, 4)
    torch.testing.assert_close(sharded(x), plain(x))
    sharded(x).sum().backward()
    assert all(parameter.grad is not None for parameter in sharded.parameters())


@world(2)
def test_packed_weights_reach_every_process(tmp_path: Path) -> None:
    """Parts of sharded parameters, and what the first process sends, are values; others stay packed."""
    gguf = pytest.importorskip("gguf", reason="the extra `gguf` of accel-bigmodel is not installed")
    torch.manual_seed(0)
    kind = gguf.GGMLQuantizationType.Q8_0
    rows = gguf.quantize(torch.randn(5, 32).numpy(), kind)
    want = torch.from_numpy(gguf.dequantize(rows, kind))
    here = ensure()
    file = tmp_path / f"{here.rank}.gguf"
    writer = gguf.GGUFWriter(file, "own")
    writer.add_tensor("weight", rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for from_first in (False, True):
        sharded: Any = nn.Linear(32, 5, bias=False, device="meta")
        fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
        plain: Any = nn.Linear(32, 5, bias=False)
        for model in (sharded, plain):
            path = tmp_path / "0.gguf" if from_first else file
            load_checkpoint_in_model(model, path, strict=True, broadcast_from_rank0=from_first)
        assert torch.equal(sharded.weight.full_tensor(), want)
        assert torch.equal(plain.weight + 0, want)
        assert plain.weight.requires_grad is from_first


@world(2)
@pytest.mark.parametrize("fails", ["at the check", "half-way"])
def test_a_rank_that_cannot_load_ends_the_load_of_all(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's folder cannot be written, or becomes full: nobody waits for it, and every model is as it was."""
    here = ensure()
    file, folder = tmp_path / f"{here.rank}.safetensors", tmp_path / f"offload {here.rank}"
    save_file(model().state_dict(), file)
    loaded = model().to("meta")
    before = dict(loaded.named_parameters())
    if here.rank == 1 and fails == "at the check":
        folder.write_text("no folder")
    if here.rank == 1:
        written: list[str] = []

        def full(tensor: torch.Tensor, name: str, *rest: Any, **kwargs: Any) -> Any:
            written.append(name)
            if len(written) == 2:
                raise OffloadError("An offloaded weight cannot be written; got no space left. Make room.")
            return offload_weight(tensor, name, *rest, **kwargs)

        monkeypatch.setattr("accel_bigmodel.checkpoint.load.offload_weight", full)
    with pytest.raises(OffloadError if here.rank == 1 else CollectiveError):
        load_checkpoint_in_model(loaded, file, {"": "disk"}, offload_folder=folder, broadcast_from_rank0=True)
    assert all(parameter is before[name] for name, parameter in loaded.named_parameters())
