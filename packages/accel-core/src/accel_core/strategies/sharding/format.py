"""How sharded models and optimizers lie in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from accel_core.checkpoint.format import Run, Source
from accel_core.errors import EngineUnavailableError

__all__ = ["Unbuilt"]


class Unbuilt:
    """Refuses to save: sharded checkpoints are not part of this version. Whole ones are loaded by the plain format."""

    def weights(self, run: Run) -> NoReturn:
        """Refuse to save."""
        raise self._refusal("save_state")

    def parts(self, run: Run, weights: Sequence[dict[str, Any]], **kwargs: object) -> NoReturn:
        """Refuse to save."""
        raise self._refusal("save_state")

    def recognises(self, source: Source) -> bool:
        """Return that no checkpoint is in this format."""
        return False

    def files_of(self, source: Source, rank: int, size: int) -> Iterable[str]:
        """Return all files."""
        return source.files()

    def model_restorations(self, run: Run, models: Sequence[Any], source: Source) -> NoReturn:
        """Refuse to load."""
        raise self._refusal("load_state")

    def optimizer_restorations(self, run: Run, source: Source) -> NoReturn:
        """Refuse to load."""
        raise self._refusal("load_state")

    def _refusal(self, asked: str) -> EngineUnavailableError:
        return EngineUnavailableError(
            f"Checkpoints of sharded models and optimizers are not built yet; got {asked}. Save weights by save_model."
        )
