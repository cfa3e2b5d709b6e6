"""How sharded models and optimizers lie in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from accel_core.checkpoint import names
from accel_core.checkpoint.format import Exchange, Part, Run
from accel_core.checkpoint.parts import FilePart
from accel_core.checkpoint.plain import PlainFormat
from accel_core.errors import EngineUnavailableError, StateError

__all__ = ["WholeFormat"]


class WholeFormat(PlainFormat):
    """Whole models and optimizers, as one process writes them, gathered from the ranks.

    So what was saved here goes on under any other strategy and number of ranks, and the other way round.

    Args:
        kind: The layout of checkpoints that the plugin names.
        whole_optimizer: Gathers the state of an optimizer; every rank calls it. The second argument says whether this
            rank wants it.
    """

    def __init__(self, kind: str, whole_optimizer: Callable[[Any, bool], dict[str, Any]]) -> None:
        self._kind = kind
        self._whole_optimizer = whole_optimizer

    def weights(self, run: Run) -> list[dict[str, Any]]:
        """Return whole state dicts of the models on the ranks that write; every rank calls it.

        Raises:
            EngineUnavailableError: The plugin names a layout that is not whole.
        """
        if self._kind != "FULL_STATE_DICT":
            raise EngineUnavailableError(
                f"Checkpoints in shards are not built yet; got state_dict_type={self._kind}. "
                "Use state_dict_type='FULL_STATE_DICT' (FSDP_STATE_DICT_TYPE, --fsdp-state-dict-type)."
            )
        return super().weights(run)

    def parts(
        self,
        run: Run,
        weights: Sequence[dict[str, Any]],
        *,
        writes: bool,
        exchange: Exchange,
        safe_serialization: bool,
        **kwargs: object,
    ) -> list[Part]:
        """Return what this rank writes: everything, or nothing; see `CheckpointFormat.parts`."""
        states = [self._whole_optimizer(own, writes) for own in run.optimizers]
        if not writes:
            return []
        if not all(weights):
            raise StateError(
                "The first rank of each machine writes whole weights; got none on one that writes. "
                "Start the processes of a machine with consecutive ranks."
            )
        kind: Literal["tensors", "object"] = "tensors" if safe_serialization else "object"
        found: list[Part] = [
            FilePart(names.model_name(index, safe=safe_serialization), kind, state)
            for index, state in enumerate(weights)
        ]
        optimizers = (FilePart(names.optimizer_name(index), "object", state) for index, state in enumerate(states))
        return [*found, *optimizers]
