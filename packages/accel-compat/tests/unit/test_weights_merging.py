"""The command that makes one file of weights."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as distributed
from safetensors.torch import load_file
from torch import nn

from accelerate import Accelerator, _commands, load_checkpoint_in_model
from accelerate.utils import merge_fsdp_weights

pytestmark = pytest.mark.usefixtures("fresh_state")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Write a model in several files."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    Accelerator(cpu=True).save_model(model, tmp_path / "shards", max_shard_size="0.2KB")
    return tmp_path / "shards"


def _read(path: Path) -> torch.Tensor:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    load_checkpoint_in_model(model, path)
    return torch.cat([parameter.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("program", ["accelerate", "accelerate-merge-weights"])
@pytest.mark.parametrize("flags", [[], ["--unsafe_serialization"]])
def test_shards_become_one_file(shards: Path, monkeypatch: pytest.MonkeyPatch, program: str, flags: list[str]) -> None:
    """Both programs write one file, in either format, and leave the shards."""
    words = [str(shards), str(shards.parent / "whole"), *flags]
    alone = program != "accelerate"
    monkeypatch.setattr(sys, "argv", [program, *([] if alone else ["merge-weights"]), *words])
    assert (_commands.main_merge if alone else _commands.main)() == 0
    (whole,) = (shards.parent / "whole").iterdir()
    assert whole.name == ("pytorch_model.bin" if flags else "model.safetensors")
    assert torch.equal(_read(whole), _read(shards))


def test_the_folder_is_removed_where_asked(shards: Path) -> None:
    """The shards go once the file is written; a file that would go with them is refused before anything happens."""
    with pytest.raises(ValueError, match=r"would hold the merged weights"):
        merge_fsdp_weights(str(shards), str(shards / "whole"), remove_checkpoint_dir=True)
    before = _read(shards)
    merge_fsdp_weights(str(shards), str(shards.parent / "whole"), remove_checkpoint_dir=True)
    assert not shards.exists()
    assert torch.equal(_read(shards.parent / "whole"), before)


def test_distributed_checkpoints_become_whole_files(tmp_path: Path) -> None:
    """The command merges what torch's distributed checkpoints wrote, in files as large as asked."""
    state = {"a": torch.randn(8, 4), "b": torch.ones(3, dtype=torch.bfloat16)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed.save({"model": state}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0")
    words = ["merge-weights", str(tmp_path / "pytorch_model_fsdp_0"), str(tmp_path / "whole")]
    assert _commands._run([*words, "--max_shard_size", "0.1KB"]) == 0
    files = sorted((tmp_path / "whole").glob("*.safetensors"))
    assert [path.name[:11] for path in files] == ["model-00001", "model-00002"]
    found = {name: tensor for path in files for name, tensor in load_file(path).items()}
    torch.testing.assert_close(found, state, rtol=0, atol=0)
    assert _commands._run([*words, "--remove_checkpoint_dir"]) == 0
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["model.safetensors"]
    assert not (tmp_path / "pytorch_model_fsdp_0").exists()


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_no_weights_to_merge(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without weights, or none at all, is an error of one line with its name."""
    (tmp_path / "empty").mkdir()
    assert _commands._run(["merge-weights", str(tmp_path / name), str(tmp_path / "whole")]) == 1
    assert name in capsys.readouterr().err
    assert not (tmp_path / "whole").exists()
