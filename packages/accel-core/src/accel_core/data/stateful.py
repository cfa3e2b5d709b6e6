"""torchdata's `StatefulDataLoader`, where it is installed."""

from __future__ import annotations

from typing import Any, cast

from torch.utils.data import DataLoader

from accel_core.errors import MissingDependencyError

__all__ = ["stateful_class"]


def stateful_class() -> type[DataLoader[Any]]:
    """Return `torchdata.stateful_dataloader.StatefulDataLoader`.

    Raises:
        MissingDependencyError: torchdata is not installed, or older than 0.8.
    """
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise MissingDependencyError(
            f"use_stateful_dataloader=True needs torchdata's StatefulDataLoader; importing it failed: {error}. "
            "Install it with `pip install 'torchdata>=0.8'`."
        ) from error
    return cast("type[DataLoader[Any]]", StatefulDataLoader)
