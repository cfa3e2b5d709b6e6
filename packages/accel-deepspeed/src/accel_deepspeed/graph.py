"""Finds the engine that a loss comes from: the loss's graph leads to that engine's parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from accel_core.errors import PreparationError, StateError
from accel_deepspeed.engines import Engine

_RECOMPUTED = "CheckpointFunction"
"""Part of the names of graph nodes that recompute the forward pass, and so hide the parameters behind them."""


def engine_of(loss: torch.Tensor, engines: Sequence[Engine]) -> Engine:
    """Return the engine that a loss was computed with.

    With one engine, the parameter nearest to the loss decides; with several, the whole graph is searched.
    """
    found: list[Engine] = []
    nodes = deque([loss.grad_fn])
    seen: set[object] = set()
    while nodes:
        node = nodes.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        parameter = getattr(node, "variable", None)
        if parameter is not None:
            own = next((engine for engine in engines if id(parameter) in engine.parameters), None)
            if own is not None and len(engines) == 1:  # no other engine can follow, so the search ends early
                return own
            if own is not None and own not in found:
                found.append(own)
        nodes += [following for following, _ in node.next_functions]
    # Reentrant checkpointing hides parameters; with one engine there is no doubt.
    if not found and len(engines) == 1 and any(_RECOMPUTED in type(node).__name__ for node in seen):
        return engines[0]
    if not found:
        raise StateError(
            "A loss has to come from a model that was prepared with its optimizer; got one whose graph leads to none "
            f"of the {len(engines)} engines. Prepare model and optimizer together, and compute the loss with that "
            "model."
        )
    if len(found) > 1:
        raise PreparationError(
            f"A loss has to come from a single DeepSpeed engine; got one that comes from {len(found)}. Compute a loss "
            "for each model, and call backward for each, with .detach() where one feeds the other."
        )
    return found[0]
