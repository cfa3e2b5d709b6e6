"""How sharded models and optimizers lie in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from accel_core.errors import EngineUnavailableError

__all__ = ["Unbuilt"]


class Unbuilt:
    """Refuses to save and to load: sharded checkpoints are not part of this version."""

    def parts(self, run: object, weights: Sequence[Any], **kwargs: object) -> NoReturn:
        """Refuse to save."""
        raise self._refusal("save_state")

    def model_restorations(self, run: object, models: Sequence[Any], source: object) -> NoReturn:
        """Refuse to load."""
        raise self._refusal("load_state")

    def optimizer_restorations(self, run: object, source: object) -> NoReturn:
        """Refuse to load."""
        raise self._refusal("load_state")

    def _refusal(self, asked: str) -> EngineUnavailableError:
        return EngineUnavailableError(
            f"Checkpoints of sharded models and optimizers are not built yet; got {asked}. Save weights by save_model."
        )
