"""Reading state dicts through whoever holds the weights."""

import pytest
import torch
from torch import nn

from accel_core.modules import offloaded


class Shelf:
    """Holds the weights of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def holds(self, model: nn.Module) -> bool:
        """Tell whether it is the one model."""
        return model is self.model

    def state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Give ones for every tensor."""
        return {name: torch.ones(tensor.shape) for name, tensor in model.state_dict().items()}


def test_the_holder_of_a_model_gives_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered holder is asked for its own model alone; other models give their own state."""
    monkeypatch.setattr(offloaded, "_holders", [])
    held, plain = nn.Linear(2, 2, device="meta"), nn.Linear(2, 2)
    shelf = Shelf(held)
    offloaded.register(shelf)
    offloaded.register(shelf)
    assert offloaded.find(held) is shelf
    assert offloaded.find(plain) is None
    assert torch.equal(offloaded.state_dict(held)["weight"], torch.ones(2, 2))
    assert torch.equal(offloaded.state_dict(plain)["weight"], plain.weight)
