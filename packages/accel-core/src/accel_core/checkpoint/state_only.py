"""A state in the place of a model, for formats whose engine holds the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from accel_core.modules.unwrap import canonical_name


class StateOnlyModel(nn.Module):
    """Stands for a model with a state by parameters; tied ones are one tensor."""

    def __init__(self, state: dict[str, Any], ties: Sequence[Sequence[str]] = ()) -> None:
        super().__init__()
        self.state = state
        for group in ties:
            there = [name for name in map(canonical_name, group) if name in state]
            state.update(dict.fromkeys(there, state[there[0]]) if there else {})

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, Any]:  # type: ignore[override]
        """Return the state itself, without a copy."""
        return self.state

    def load_state_dict(self, state_dict: Any, *args: object, **kwargs: object) -> Any:
        """Update the state with the given entries."""
        self.state.update(state_dict)
