"""Loaders that are split by rank already: recognizing them, and saying so."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from torch.utils.data import DataLoader, IterableDataset

from accel_core.data.samplers import IterableDatasetShard, get_sampler
from accel_core.errors import DoubleShardingError, PreparationError
from accel_core.mesh.layout import Layout

_LoaderT = TypeVar("_LoaderT", bound="DataLoader[Any]")
_RANKS = ("num_replicas", "world_size", "num_processes", "dp_world_size")
_RANK = ("rank", "process_index", "dp_rank")


def already_sharded(dataloader: _LoaderT) -> _LoaderT:
    """Declare that a loader gives each rank its own part, so that preparing it does not split it again.

    Args:
        dataloader: A loader that is not prepared yet.

    Returns:
        `dataloader`.

    Examples:
        >>> loader = accelerator.prepare(already_sharded(loader))
    """
    # An attribute, because a copy or a pickle of the loader has to keep it: split again, it would lose samples.
    dataloader._accel_reads_own_part = True
    return dataloader


def is_declared_local(dataloader: DataLoader[Any]) -> bool:
    """Return whether `already_sharded` was called on a loader."""
    return getattr(dataloader, "_accel_reads_own_part", False) is True


def check_not_sharded(dataloader: DataLoader[Any], ranks: int) -> None:
    """Refuse a loader that gives each rank its own part already.

    Raises:
        DoubleShardingError: It is split: by a `DistributedSampler` or another sampler that names its rank, by
            `datasets.distributed.split_dataset_by_node`, or by a dataset that names its rank.
    """
    found = _split_of(dataloader)
    if found is not None:
        raise DoubleShardingError(
            f"This loader gives each rank its own part already, and preparing it would split that part again: every "
            f"rank would read 1/{ranks} of its part, and the rest would never be read; got {found.by}. Either remove "
            "that split and let `prepare` share out the data, or keep it and say so: "
            "`prepare_data_loader(loader, sharding='local')`, or `already_sharded(loader)` before "
            "`accelerator.prepare(loader)`."
        )


def check_read_alike(dataloader: DataLoader[Any], layout: Layout) -> None:
    """Refuse a loader that gives each rank its own part where ranks of one replica have to read the same.

    One that is declared to be split is right if its split names this rank's part of the data, out of all parts.
    """
    if layout.replicas == layout.world_size:
        return
    split, declared = _split_of(dataloader), is_declared_local(dataloader)
    if not declared and (split is None or layout.replicas > 1):
        return  # nothing to refuse, or splitting it again is refused
    if split is not None and (split.rank, split.ranks) == (layout.part, layout.replicas):
        return
    raise PreparationError(
        f"Ranks that share a replica read the same data, here part {layout.part} of {layout.replicas}; got a loader "
        f"that gives each rank a part of its own, by {'already_sharded' if split is None else split.by}. Pass the "
        "whole loader; or give the ranks of a replica the same part, and say so by "
        "prepare_data_loader(loader, sharding='local', torch_device_mesh=accelerator.torch_device_mesh)."
    )


class _Split(NamedTuple):
    """What splits a loader by rank, and the rank and the number of ranks that it names."""

    by: str
    rank: int
    ranks: int


def _split_of(dataloader: DataLoader[Any]) -> _Split | None:
    """Return what splits a loader by rank, or `None`."""
    for part in (dataloader.batch_sampler, dataloader.sampler, get_sampler(dataloader)):
        if part is not None:
            found = _named_ranks(part, "sampler")
            if found is not None:
                return found
    dataset: object = dataloader.dataset
    while dataset is not None:
        split = getattr(dataset, "_distributed", None)
        if split is not None and getattr(split, "world_size", 1) > 1:
            by = f"split_dataset_by_node (rank {split.rank} of {split.world_size})"
            return _Split(by, split.rank, split.world_size)
        if isinstance(dataset, IterableDataset | IterableDatasetShard):
            found = _named_ranks(dataset, "dataset")
            if found is not None:
                return found
        dataset = getattr(dataset, "dataset", None)
    return None


def _named_ranks(part: object, kind: str) -> _Split | None:
    """Return rank and number of ranks where an object names both and there are several."""
    for count in _RANKS:
        ranks = getattr(part, count, None)
        if not isinstance(ranks, int) or ranks < 2:
            continue
        for name in _RANK:
            rank = getattr(part, name, None)
            if isinstance(rank, int):
                return _Split(f"the {kind} {type(part).__name__} ({name}={rank}, {count}={ranks})", rank, ranks)
    return None
