"""Loaders that are split by rank already: recognising them, and saying so."""

from __future__ import annotations

from typing import Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from accel_core.data.samplers import BatchSamplerShard, IterableDatasetShard, get_sampler
from accel_core.errors import DoubleShardingError

__all__ = ["already_sharded", "check_not_sharded", "is_declared_local"]

_LoaderT = TypeVar("_LoaderT", bound="DataLoader[Any]")
_RANKS = ("num_replicas", "world_size", "num_processes", "dp_world_size")
_RANK = ("rank", "process_index", "dp_rank")


def already_sharded(dataloader: _LoaderT) -> _LoaderT:
    """Declare that a loader gives each rank its own part, so that preparing it does not split it again.

    Args:
        dataloader: A loader that is not prepared yet.

    Returns:
        `dataloader`.
    """
    # An attribute, because a copy or a pickle of the loader has to keep it: split again, it would lose samples.
    dataloader._accel_reads_own_part = True
    return dataloader


def is_declared_local(dataloader: DataLoader[Any]) -> bool:
    """Return whether `already_sharded` was called on a loader."""
    return getattr(dataloader, "_accel_reads_own_part", False) is True


def check_not_sharded(dataloader: DataLoader[Any], ranks: int) -> None:
    """Refuse a loader that gives each rank its own part already.

    Args:
        dataloader: The loader.
        ranks: Number of ranks that it would be split between.

    Raises:
        DoubleShardingError: It is split: by a `DistributedSampler` or another sampler that names its rank, by
            `datasets.distributed.split_dataset_by_node`, or by a dataset that names its rank.
    """
    found = _splitter(dataloader)
    if found is not None:
        raise DoubleShardingError(
            f"This loader gives each rank its own part already, and preparing it would split that part again: every "
            f"rank would read 1/{ranks} of its part, and the rest would never be read; got {found}. Either remove "
            "that split and let `prepare` share out the data, or keep it and say so: "
            "`prepare_data_loader(loader, sharding='local')`, or `already_sharded(loader)` before "
            "`accelerator.prepare(loader)`."
        )


def _splitter(dataloader: DataLoader[Any]) -> str | None:
    """Describe what splits a loader by rank, or return `None`."""
    for part in (dataloader.batch_sampler, dataloader.sampler, get_sampler(dataloader)):
        if isinstance(part, DistributedSampler | BatchSamplerShard) or part is not None:
            found = _named_ranks(part)
            if found is not None:
                return f"the sampler {type(part).__name__} ({found})"
    dataset: object = dataloader.dataset
    while dataset is not None:
        split = getattr(dataset, "_distributed", None)
        if split is not None and getattr(split, "world_size", 1) > 1:
            return f"split_dataset_by_node (rank {split.rank} of {split.world_size})"
        if isinstance(dataset, IterableDataset | IterableDatasetShard):
            found = _named_ranks(dataset)
            if found is not None:
                return f"the dataset {type(dataset).__name__} ({found})"
        dataset = getattr(dataset, "dataset", None)
    return None


def _named_ranks(part: object) -> str | None:
    """Return "rank r of n" where an object names both and there are several."""
    for count in _RANKS:
        ranks = getattr(part, count, None)
        if not isinstance(ranks, int) or ranks < 2:
            continue
        for name in _RANK:
            rank = getattr(part, name, None)
            if isinstance(rank, int):
                return f"{name}={rank}, {count}={ranks}"
    return None
