"""Preparing a loader: which part each rank gets, and how."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accel_core.comm.batch import slice_tensors
from accel_core.data.declared import already_sharded, check_not_sharded, is_declared_local
from accel_core.data.dispatcher import DataLoaderDispatcher
from accel_core.data.loader import DataLoaderShard, PreparedLoader
from accel_core.data.mesh import data_place
from accel_core.data.samplers import (
    BatchSamplerShard,
    IndexShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    TallyCollate,
    check_split,
    get_sampler,
)
from accel_core.data.stateful import stateful_class
from accel_core.errors import ConfigurationError
from accel_core.process import world

__all__ = ["additional_kwargs", "already_sharded", "prepare_data_loader", "v"]

additional_kwargs = {"in_order": True}
"""Settings of torch's loader, with their defaults, that came after torch 2.6."""

v = "2.6.0"
"""The version of torch that brought `additional_kwargs`."""

UNEVEN_ENDS = ("drop", "repeat", "empty")
_LoaderT = TypeVar("_LoaderT", bound="DataLoader[Any]")


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    *,
    sharding: Literal["auto", "global", "local"] = "auto",
    uneven_end: Literal["drop", "repeat", "empty"] = "drop",
) -> DataLoader[Any]:
    """Return a loader of the same class that gives each rank its part, and knows its end and its position.

    `dataloader` itself stays as it is, except that a random sampler without a generator gets one where several ranks
    share the data, because they have to draw the same order.

    Args:
        dataloader: The loader.
        device: Where batches go with `put_on_device`; this rank's device where `None`.
        num_processes: Number of ranks that share the data; all where `None`.
        process_index: This rank.
        split_batches: Cut each batch in one part a rank, so that the batch size is that of all ranks together.
        put_on_device: Move batches to the device.
        rng_types: Random number generators that all ranks take over from rank 0 when an iteration begins.
        dispatch_batches: Let rank 0 read all data and send each rank its part. Where `None`: for an iterable dataset
            that goes to the device, and not otherwise.
        even_batches: Fill up the last global batch of a map-style dataset with samples from the start.
        slice_fn_for_dispatch: Takes a rank's part out of a global batch when dispatching, in place of
            `slice_tensors`.
        use_seedable_sampler: Replace a `RandomSampler` by a `SeedableRandomSampler`.
        data_seed: Its seed.
        non_blocking: Copy to the device without waiting; the copy of the next batch then runs beside the computation.
        use_stateful_dataloader: Build on torchdata's `StatefulDataLoader`.
        torch_device_mesh: The mesh of all ranks; ranks that differ in other axes than those of data parallelism get
            the same batches.
        sharding: "global": every rank's loader gives all the data, of which it gets a part. "local": each rank's
            loader gives the rank's own part already. "auto": global, and a loader that looks local is refused.
        uneven_end: What happens when streams of the ranks differ in length. "drop": all end with the shortest.
            "repeat": a rank that has run out repeats batches until the longest ends. "empty": such a rank gets batches
            without rows.

    Raises:
        ConfigurationError: `split_batches` with an indivisible batch size, or an unknown `sharding` or `uneven_end`.
        DoubleShardingError: The loader is split by rank already.
        MissingDependencyError: `use_stateful_dataloader` without torchdata.
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader
    _check_words(sharding, uneven_end)
    ranks, rank = _place(num_processes, process_index, torch_device_mesh)
    if put_on_device and device is None:
        device = world.ensure().device
    local = ranks > 1 and (sharding == "local" or is_declared_local(dataloader))
    streams = isinstance(dataloader.dataset, IterableDataset)
    dispatches = dispatch_batches if dispatch_batches is not None else streams and put_on_device
    batches = dataloader.batch_sampler if dataloader.batch_sampler is not None else dataloader.sampler
    if ranks > 1 and not local:
        if sharding == "auto":
            check_not_sharded(dataloader, ranks)
        if split_batches:
            check_split(dataloader.batch_size or getattr(batches, "batch_size", None), ranks)
    changed: dict[str, Any] = {
        "device": device if put_on_device else None,
        "rng_types": rng_types,
        "_non_blocking": non_blocking,
        "_drop_last": bool(dataloader.drop_last or getattr(batches, "drop_last", False)),
        "torch_device_mesh": torch_device_mesh,
        "uneven_end": uneven_end,
        "local_ranks": ranks if local else 0,
    }
    if use_seedable_sampler:
        changed |= _seedable(dataloader, data_seed)
    if ranks > 1:
        changed |= _common_order(dataloader, changed)
    source = _stateful(dataloader) if use_stateful_dataloader else dataloader
    changed["use_stateful_dataloader"] = use_stateful_dataloader
    if ranks == 1 or local:
        return DataLoaderShard.adopt(source, **changed)
    if dispatches:
        return DataLoaderDispatcher.adopt(
            source, split_batches=split_batches, slice_fn=slice_fn_for_dispatch or slice_tensors, **changed
        )
    batches = changed.get("batch_sampler", batches)
    if streams:
        changed |= _stream_part(dataloader, ranks, rank, split_batches)
    elif isinstance(batches, BatchSampler) or dataloader.batch_sampler is not None:
        which = "sampler" if dataloader.batch_sampler is None else "batch_sampler"
        changed[which] = BatchSamplerShard(batches, ranks, rank, split_batches, even_batches)
    else:
        changed["sampler"] = IndexShard(changed.get("sampler", batches), ranks, rank, even_batches=even_batches)
    return DataLoaderShard.adopt(source, **changed)


def _check_words(sharding: str, uneven_end: str) -> None:
    for name, word, allowed in (
        ("sharding", sharding, ("auto", "global", "local")),
        ("uneven_end", uneven_end, UNEVEN_ENDS),
    ):
        if word not in allowed:
            raise ConfigurationError(f"A loader cannot be prepared with {name}={word!r}. Use one of {list(allowed)}.")


def _place(num_processes: int | None, process_index: int | None, mesh: Any) -> tuple[int, int]:
    """Return how many parts the data has, and which is this rank's."""
    if mesh is not None:
        return data_place(mesh)
    if num_processes is None or process_index is None:
        here = world.ensure()
        num_processes = here.size if num_processes is None else num_processes
        process_index = here.rank if process_index is None else process_index
    return num_processes, process_index


def _seedable(dataloader: DataLoader[Any], data_seed: int | None) -> dict[str, Any]:
    """Replace a random sampler by one that depends on seed and epoch alone."""
    sampler = get_sampler(dataloader)
    if not isinstance(sampler, RandomSampler) or isinstance(sampler, SeedableRandomSampler):
        return {}
    seedable = SeedableRandomSampler(
        sampler.data_source, replacement=sampler.replacement, num_samples=sampler.num_samples, data_seed=data_seed
    )
    batches = dataloader.batch_sampler
    if batches is None:
        return {"sampler": seedable}
    batches = copy.copy(batches)
    cast(Any, batches).sampler = seedable
    return {"batch_sampler": batches, "sampler": seedable}


def _common_order(dataloader: DataLoader[Any], changed: dict[str, Any]) -> dict[str, Any]:
    """Give a sampler that draws from the default generator one of its own, which ranks can synchronise."""
    if isinstance(dataloader.dataset, IterableDataset):
        return {"synchronized_generator": getattr(dataloader.dataset, "generator", None)}
    sampler = changed.get("sampler") or get_sampler(dataloader)
    if getattr(sampler, "generator", False) is None and not isinstance(sampler, SeedableRandomSampler):
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    return {"synchronized_generator": getattr(sampler, "generator", None)}


def _stream_part(dataloader: DataLoader[Any], ranks: int, rank: int, split: bool) -> dict[str, Any]:
    """Let an iterable dataset give the samples of one rank, each with what is known of its global batch."""
    size = dataloader.batch_size
    shard = IterableDatasetShard(
        cast("IterableDataset[Any]", dataloader.dataset),
        batch_size=1 if size is None else size,
        drop_last=dataloader.drop_last,
        num_processes=ranks,
        process_index=rank,
        split_batches=split and size is not None,
    )
    shard.tells_tally = True
    changed: dict[str, Any] = {"dataset": shard, "collate_fn": TallyCollate(dataloader.collate_fn)}
    if split and size is not None:
        part = size // ranks
        changed["batch_size"] = part
        changed["batch_sampler"] = BatchSampler(dataloader.sampler, part, dataloader.drop_last)
    return changed


def _stateful(dataloader: _LoaderT) -> DataLoader[Any]:
    """Return `dataloader` with what torchdata's `StatefulDataLoader` adds, keeping its own class and attributes."""
    stateful = stateful_class()
    if isinstance(dataloader, stateful):
        return dataloader
    own = type(dataloader)
    blank = stateful(cast(Any, []), num_workers=0)
    made: Any = object.__new__(stateful if own is DataLoader else type(own.__name__, (own, stateful), {}))
    made.__dict__.update(blank.__dict__)
    made.__dict__.update(dataloader.__dict__)
    return cast("DataLoader[Any]", made)
