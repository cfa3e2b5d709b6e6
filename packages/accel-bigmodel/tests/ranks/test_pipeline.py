"""Pipeline inference over gloo: two processes, one stage each."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import init_empty_weights, load_checkpoint_in_model, prepare_pippy
from accel_core.errors import CheckpointError, RemoteRankError
from accel_core.process.world import ensure
from accel_testing import requires, world


def model() -> nn.Module:
    """Make the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.ReLU())]).eval()


class Named(nn.Module):
    """Four layers, each an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = model()[::2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the output."""
        return self.last(self.third(self.second(self.first(x)).relu()))


@world(2)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("named", marks=pytest.mark.full("another case of a grid")),
        pytest.param("sequential", marks=requires("torch:2.10")),
    ],
)
def test_a_pipeline_computes_what_the_model_does(kind: str) -> None:
    """The last process, or with gathering every one, has the model's output, for whole and odd batches."""
    made = {"named": Named, "sequential": model}[kind]
    here = ensure()
    for gather in (False, True):
        for batch in (4, 3):
            x = torch.arange(batch * 4.0).reshape(batch, 4)
            expected = made()(x)
            staged = prepare_pippy(made(), split_points="auto", example_args=(x,), gather_output=gather)
            assert len(staged.hf_split_points) == 1
            output = staged(x)
            if gather or here.is_last:
                torch.testing.assert_close(output, expected)
            else:
                assert output is None


@world(2)
def test_the_first_rank_reads_for_all(tmp_path: Path) -> None:
    """With `broadcast_from_rank0` only the first process opens the file, and its error reaches both."""
    here = ensure()
    source = model()
    if here.is_main:
        save_file(source.state_dict(), tmp_path / f"{here.rank}.safetensors")
    with init_empty_weights():
        target = model()
    with torch.device("meta"):  # whose memory nothing could be received in
        load_checkpoint_in_model(target, tmp_path / f"{here.rank}.safetensors", broadcast_from_rank0=True)
    assert all(torch.equal(target.state_dict()[name], value) for name, value in source.state_dict().items())
    with pytest.raises((CheckpointError, RemoteRankError), match="No checkpoint at"):
        load_checkpoint_in_model(target, tmp_path / "nowhere.safetensors", broadcast_from_rank0=True)
