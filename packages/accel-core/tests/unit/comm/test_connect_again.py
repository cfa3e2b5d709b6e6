"""Each kind of store in which ranks meet is connected to twice, also by a torch whose stores cannot be cloned."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from accel_core._torch import connect_again


def _without_clone(kind: type) -> Any:
    """Return a class of stores as torch 2.6 has it."""

    class Store(kind):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name == "clone":
                raise AttributeError(name)
            return super().__getattribute__(name)

    return Store


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda own, folder: own(dist.FileStore)(str(folder / "store"), 1),
        lambda own, folder: own(dist.TCPStore)("127.0.0.1", 0, 1, True),
    ],
    ids=["file", "tcp"],
)
def test_one_connection_waits_while_the_other_writes(old: bool, make: Callable[..., Any], tmp_path: Path) -> None:
    """What waits does not hold up the first connection, which writes what is waited for."""
    own = _without_clone if old else lambda kind: kind
    stores = connect_again(own(dist.PrefixStore)("run", make(own, tmp_path)))
    assert stores is not None
    first, second = stores
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(second.get("word")))
    thread.start()
    first.set("word", "here")
    thread.join()
    assert found == [b"here"]
