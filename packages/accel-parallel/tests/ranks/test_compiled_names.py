"""Names under which compiled models with adapters are saved, whatever wraps them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from several_ranks import blocks, fsdp, refused
from torch import nn

from accel_core.accelerator import Accelerator
from accel_core.errors import PreparationError
from accel_core.modules.compilation import compile_regions
from accel_core.state import reset_all
from accel_testing import requires, world


class Block(nn.Module):
    """A layer, and an adapter to it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.lora = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return numbers for numbers."""
        found: torch.Tensor = self.base(x) + self.lora(x)
        return found


class Adapted(nn.Module):
    """A model inside another, as adapters put it there."""

    def __init__(self, base_model: nn.Module) -> None:
        super().__init__()
        self.base_model, self.head = base_model, nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return numbers for numbers."""
        found: torch.Tensor = self.head(self.base_model(x))
        return found


def _compiled(model: nn.Module) -> nn.Module:
    found: Any = torch.compile(model, backend="eager")
    assert isinstance(found, nn.Module)
    return found


def _forms() -> dict[str, nn.Module]:
    """Return one model, compiled in several ways."""
    torch.manual_seed(0)
    blocks = [Block(), Block()]
    plain = Adapted(nn.Sequential(*blocks))
    made = [copy.deepcopy(plain) for _ in range(2)]
    listed = copy.deepcopy(plain)
    listed.base_model = nn.Sequential(*(_compiled(block) for block in copy.deepcopy(blocks)))
    inner = Adapted(_compiled(made[1].base_model))
    inner.head = made[1].head
    return {
        "whole": _compiled(made[0]),
        "inside": inner,
        "blocks": listed,
        "regions": compile_regions(copy.deepcopy(plain), backend="eager"),
        "plain": plain,
    }


@pytest.mark.parametrize(
    "engine",
    [
        "ddp",
        pytest.param("fsdp1", marks=pytest.mark.full("compiled once more")),
        pytest.param("fsdp2", marks=requires("torch:2.8")),
    ],
)
@world(2)
def test_states_have_the_names_of_the_bare_model(engine: str, tmp_path: Path) -> None:
    """However a model is compiled, what is saved of it loads into a plain one, and holds what was trained."""
    forms = _forms()
    plain = forms.pop("plain")
    for how, net in forms.items():
        reset_all()
        given = blocks("Block") | {"activation_checkpointing": how == "whole", "state_dict_type": "FULL_STATE_DICT"}
        given |= {"use_orig_params": True} if engine == "fsdp1" else {}
        plugin = fsdp(int(engine[-1]), **given) if engine != "ddp" else None
        accelerator = Accelerator(fsdp_plugin=plugin)
        if engine == "fsdp1" and how == "blocks":
            words = r"got base_model\.0\._orig_mod, which was compiled by itself"
            with refused(PreparationError, words, accelerator, net):
                accelerator.prepare(net)
            continue
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(2, 8)).sum())
        optimizer.step()
        state = accelerator.get_state_dict(model)
        accelerator.save_model(model, tmp_path / how)
        accelerator.save_state(tmp_path / how / "state")
        if accelerator.is_main_process:
            for saved in (state, *(load_file(tmp_path / how / at / "model.safetensors") for at in ("", "state"))):
                assert saved.keys() == plain.state_dict().keys(), how
                plain.load_state_dict(saved)
                torch.testing.assert_close(plain.state_dict(), state)
