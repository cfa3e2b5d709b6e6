"""Reading state dicts through whoever holds the weights."""

import pytest
import torch
from torch import nn

from accel_core.modules import offloaded


def test_the_holder_of_a_model_gives_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered holder is asked for its own model alone; other models give their own state."""
    held, plain = nn.Linear(2, 2, device="meta"), nn.Linear(2, 2)

    def shelf(model: nn.Module) -> dict[str, torch.Tensor] | None:
        return {"weight": torch.ones(2, 2)} if model is held else None

    monkeypatch.setattr(offloaded, "holders", [shelf])
    assert torch.equal(offloaded.state_dict(held)["weight"], torch.ones(2, 2))
    assert torch.equal(offloaded.state_dict(plain)["weight"], plain.weight)
