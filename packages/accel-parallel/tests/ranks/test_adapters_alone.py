"""The adapters of a model in shards, saved alone: what one process trains, and what it loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from several_ranks import fsdp
from torch import nn

from accel_core.accelerator import Accelerator
from accel_core.checkpoint.load import load_state
from accel_core.checkpoint.run import BareRun
from accel_core.errors import ConfigurationError
from accel_core.mesh.tensor import whole
from accel_testing import requires, world


class Adapted(nn.Module):
    """A frozen layer with an adapter beside it, under the names and with the note by which PEFT's models are known."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.peft_config = {"default": None}
        self.plain, self.lora = nn.Linear(4, 4), nn.ModuleDict({"default": nn.Linear(4, 4, bias=False)})
        self.plain.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what was learned."""
        found: torch.Tensor = self.plain(x) + self.lora["default"](x)
        return found


def trained(accelerator: Accelerator | None = None) -> nn.Module:
    """Return the model after one step."""
    model: nn.Module = Adapted()
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward() if accelerator is None else accelerator.backward(loss)
    optimizer.step()
    return model


@requires("torch:2.8")  # the first that computes in shards on a CPU
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@world(2)
def test_adapters_of_shards_are_saved_and_loaded_alone(kind: str, tmp_path: Path) -> None:
    """They are those that one process trains; models in shards and whole ones load them, and their rest stays."""
    expected = trained().state_dict()
    accelerator = Accelerator(cpu=True, fsdp_plugin=fsdp(state_dict_type=kind))
    model = trained(accelerator)
    accelerator.save_state(str(tmp_path / "adapters"), parts=("adapters",))
    alone = Adapted()
    with torch.no_grad():
        for parameter in (*model.parameters(), *alone.parameters()):
            parameter.fill_(7.0)
    loaded = accelerator.load_state(str(tmp_path / "adapters"))
    assert (loaded.part, loaded.findings) == ("adapters", [])
    assert load_state(BareRun([alone]), tmp_path / "adapters").findings == []
    for name, value in model.state_dict().items():
        wanted = expected[name] if name.startswith("lora") else torch.full_like(expected[name], 7.0)
        torch.testing.assert_close(whole(value), wanted)
        torch.testing.assert_close(alone.state_dict()[name], wanted)


@requires("torch:2.8")
@world(2)
def test_adapters_of_other_engines_are_refused(tmp_path: Path) -> None:
    """FSDP1 writes models in its own way: adapters alone are refused on all ranks, and nothing is written."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=fsdp(1, use_orig_params=True))
    model = trained(accelerator)
    with pytest.raises(ConfigurationError, match="Not every strategy"):
        accelerator.save_state(str(tmp_path / "adapters"), parts=("adapters",))
    assert not (tmp_path / "adapters").exists()
    assert model.training
