"""Preparing a loader: which part each rank gets, and how."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accel_core._records import record
from accel_core.comm.batch import slice_tensors
from accel_core.data.adapter import stateful_class
from accel_core.data.dispatcher import DataLoaderDispatcher
from accel_core.data.loader import DataLoaderShard, PreparedLoader
from accel_core.data.presharded import already_sharded, check_not_sharded, is_declared_local
from accel_core.data.samplers import (
    BatchSamplerShard,
    CountedCollate,
    IndexShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    batch_size_of,
    check_split,
    get_sampler,
)
from accel_core.data.settings import LoaderSettings, mesh_parts
from accel_core.errors import expect_one_of
from accel_core.mesh.layout import Layout
from accel_core.plugins.loading import UNEVEN_ENDS
from accel_core.process.world import ensure

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["already_sharded", "prepare_data_loader"]


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
    torch_device_mesh: DeviceMesh | None = None,
    *,
    sharding: Literal["auto", "global", "local"] = "auto",
    uneven_end: Literal["drop", "repeat", "empty"] = "drop",
    layout: Layout | None = None,
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
        layout: How the ranks of the run share out data and model: ranks of one replica read the same part. It decides
            instead of `num_processes`, `process_index` and `torch_device_mesh`.
        uneven_end: What happens when streams of the ranks differ in length. "drop": all end with the shortest; of a
            stream that is shared out by its shards, nothing is dropped, and this means "repeat". "repeat": a rank that
            has run out repeats batches until the longest ends. "empty": such a rank gets batches without rows.

    Returns:
        The prepared loader.

    Raises:
        ConfigurationError: `split_batches` with an indivisible batch size, or an unknown `sharding` or `uneven_end`.
        DoubleShardingError: The loader is split by rank already.
        MissingDependencyError: `use_stateful_dataloader` without torchdata.

    Examples:
        >>> shard = prepare_data_loader(loader, num_processes=4, process_index=1)
        >>> len(loader), len(shard)
        (4, 1)
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader
    expect_one_of(("auto", "global", "local"), "sharding", sharding)
    expect_one_of(UNEVEN_ENDS, "uneven_end", uneven_end)
    place = _place(num_processes, process_index, torch_device_mesh, layout)
    local = place.ranks > 1 and (sharding == "local" or is_declared_local(dataloader))
    if not local:
        _check_whole(dataloader, place.ranks, sharding=sharding, split_batches=split_batches)
    streams = isinstance(dataloader.dataset, IterableDataset)
    order = _order(dataloader, place.readers, data_seed, seedable=use_seedable_sampler)
    batches = order.get("batch_sampler", _batches_of(dataloader))
    settings = LoaderSettings(
        device=(device or ensure().device) if put_on_device else None,
        rng_types=rng_types,
        synchronized_generator=_synchronized(dataloader, order) if place.readers > 1 else None,
        drop_last=bool(dataloader.drop_last or getattr(batches, "drop_last", False)),
        non_blocking=non_blocking,
        torch_device_mesh=torch_device_mesh,
        split_batches=split_batches,
        slice_fn=slice_fn_for_dispatch or slice_tensors,
        uneven_end=uneven_end,
        local_ranks=place.ranks if local else 0,
        parts=place.parts,
    )
    source = _stateful(dataloader) if use_stateful_dataloader else dataloader
    order["use_stateful_dataloader"] = use_stateful_dataloader
    dispatches = dispatch_batches if dispatch_batches is not None else streams and put_on_device
    # One process has nobody to send to: it dispatches where that was asked for, or a function waits for the batches.
    alone = ensure().size == 1 and (dispatch_batches or slice_fn_for_dispatch is not None)
    if dispatches and not local and (place.readers > 1 or alone):
        return DataLoaderDispatcher.adopt(source, settings=settings, **order)
    if place.ranks == 1 or local:
        return DataLoaderShard.adopt(source, settings=settings, **order)
    return _shard(source, settings, order, place, even_batches=even_batches)


def _shard(
    source: DataLoader[Any], settings: LoaderSettings, order: dict[str, Any], place: _Place, *, even_batches: bool
) -> DataLoader[Any]:
    """Build a loader that gives this rank's part of what `source` gives."""
    batches = order.get("batch_sampler", _batches_of(source))
    if isinstance(source.dataset, IterableDataset):
        own = None if settings.split_batches else _own_shards(source.dataset, place)
        if own is None:
            changed = _stream_part(source, place.ranks, place.rank, settings.split_batches)
        else:
            # Ranks may get shards of different lengths. The stream was given as a whole, so none of it is left out.
            end = "repeat" if settings.uneven_end == "drop" else settings.uneven_end
            settings = dataclasses.replace(settings, local_ranks=place.ranks, uneven_end=end)
            changed = {"dataset": own}
    elif isinstance(batches, BatchSampler) or source.batch_sampler is not None:
        which = "sampler" if source.batch_sampler is None else "batch_sampler"
        shard = BatchSamplerShard(batches, place.ranks, place.rank, settings.split_batches, even_batches)
        changed = {which: shard}
    else:
        single = order.get("sampler", batches)
        changed = {"sampler": IndexShard(single, place.ranks, place.rank, even_batches=even_batches)}
    return DataLoaderShard.adopt(source, settings=settings, **(order | changed))


def _own_shards(dataset: IterableDataset[Any], place: _Place) -> object | None:
    """Return the shards of one rank, of a stream that can give them without reading the others; `None` of any other."""
    shard = getattr(dataset, "shard", None)
    shards = getattr(dataset, "num_shards", getattr(dataset, "n_shards", None))
    # Fewer would leave ranks without data, and where some get one more, the others would repeat data meanwhile.
    if not callable(shard) or not isinstance(shards, int) or not shards or shards % place.ranks:
        return None
    own: object = shard(num_shards=place.ranks, index=place.rank)
    return own


def _batches_of(dataloader: DataLoader[Any]) -> object:
    """Return what gives a loader's indices."""
    return dataloader.batch_sampler if dataloader.batch_sampler is not None else dataloader.sampler


@record(frozen=True)
class _Place:
    """Where this rank stands among those that share the data."""

    ranks: int  # number of parts that the data has
    rank: int  # the part of this rank
    # For each rank of the world, its part; `None` where every rank has one of its own, or that is not known.
    parts: tuple[int, ...] | None = None

    @property
    def readers(self) -> int:
        """Number of ranks that have to read the data in one order, those of one replica included."""
        return self.ranks if self.parts is None else len(self.parts)


def _place(
    num_processes: int | None, process_index: int | None, mesh: DeviceMesh | None, layout: Layout | None
) -> _Place:
    if layout is not None:
        return _Place(layout.replicas, layout.part, layout.parts)
    if mesh is not None:
        parts = mesh_parts(mesh)
        return _Place(max(parts) + 1, parts[ensure().rank], parts)
    if num_processes is None or process_index is None:
        world = ensure()
        num_processes = world.size if num_processes is None else num_processes
        process_index = world.rank if process_index is None else process_index
    return _Place(num_processes, process_index)


def _check_whole(dataloader: DataLoader[Any], ranks: int, *, sharding: str, split_batches: bool) -> None:
    """Refuse a loader that is split already, or whose batches cannot be."""
    if sharding == "auto" and ranks > 1:
        check_not_sharded(dataloader, ranks)
    if split_batches and dataloader.batch_sampler is not None:
        check_split(batch_size_of(dataloader), ranks)


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
    batches = copy.copy(batches)  # the user's own stays as it is
    cast(Any, batches).sampler = seedable
    return {"batch_sampler": batches, "sampler": seedable}


def _order(dataloader: DataLoader[Any], readers: int, data_seed: int | None, *, seedable: bool) -> dict[str, Any]:
    """Return the samplers that replace those of a loader, and make several ranks draw one order."""
    order = _seedable(dataloader, data_seed) if seedable else {}
    if readers == 1 or isinstance(dataloader.dataset, IterableDataset):
        return order
    sampler = order.get("sampler") or get_sampler(dataloader)
    if getattr(sampler, "generator", False) is None and not isinstance(sampler, SeedableRandomSampler):
        # Of its own, which ranks can synchronize; seeded from the default one, so that `set_seed` decides the order.
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    return order


def _synchronized(dataloader: DataLoader[Any], order: dict[str, Any]) -> torch.Generator | None:
    """Return the generator that ranks take over from rank 0 when an epoch begins."""
    streams = isinstance(dataloader.dataset, IterableDataset)
    source = dataloader.dataset if streams else order.get("sampler") or get_sampler(dataloader)
    return getattr(source, "generator", None)


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
    shard.tells_counts = True
    changed: dict[str, Any] = {"dataset": shard, "collate_fn": CountedCollate(dataloader.collate_fn)}
    if split and size is not None:
        part = size // ranks
        changed["batch_size"] = part
        changed["batch_sampler"] = BatchSampler(dataloader.sampler, part, dataloader.drop_last)
    return changed


def _stateful(dataloader: DataLoader[Any]) -> DataLoader[Any]:
    """Return `dataloader` with what torchdata's `StatefulDataLoader` adds, keeping its own class and attributes."""
    stateful = stateful_class()
    if isinstance(dataloader, stateful):
        return dataloader
    made: object = object.__new__(stateful_class(type(dataloader)))
    # What torchdata's constructor sets, without calling the constructor of the user's class again.
    made.__dict__.update(stateful(cast(Any, []), num_workers=0).__dict__)
    made.__dict__.update(dataloader.__dict__)
    return cast("DataLoader[Any]", made)
