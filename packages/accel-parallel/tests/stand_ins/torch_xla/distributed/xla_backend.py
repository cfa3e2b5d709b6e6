"""The process-group backend: gloo under the name of xla, with ranks that meet where those of the tests do."""

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def _group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _meet(url: str, **options: Any) -> Iterator[Any]:
    place = f"file://{os.environ['ACCELERATE_DEBUG_RDV_FILE']}"
    yield from dist.rendezvous(place, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


dist.Backend.register_backend("xla", _group, devices=["cpu"])
dist.register_rendezvous_handler("xla", _meet)
