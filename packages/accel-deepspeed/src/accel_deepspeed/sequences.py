"""Batches that hold a rank's part of each sequence, and loaders that return them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler

from accel_core._records import record
from accel_core.data.labels import shift_labels
from accel_core.data.loader import DataLoaderShard
from accel_core.data.samplers import BatchSamplerShard, CountedCollate, IndexShard, IterableDatasetShard
from accel_core.errors import DataError, PreparationError
from accel_core.mesh.layout import Layout
from accel_core.state.gradient import GradientState


@record(frozen=True)
class Sharing:
    """How the ranks of a run share sequences."""

    rank: int  # this rank's part of each sequence
    size: int  # number of parts of a sequence
    length: int | None = None  # tokens of every sequence; `None` if it varies
    packs: bool = False  # whether a row may hold several sequences, which attention separates by their positions

    def part_of(self, batch: object) -> dict[str, Any]:
        """Return this rank's part of a batch: its tokens of each tensor, and labels shifted by one."""
        if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), torch.Tensor):
            raise DataError(
                "Sequence parallelism needs batches that are mappings with a tensor input_ids; got "
                f"{sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__}. Return a dict "
                "from the collate function."
            )
        found = dict(batch)
        rows, tokens = found["input_ids"].shape[:2]
        if tokens % self.size or (self.length is not None and tokens != self.length):  # groups expect a fixed length
            wanted = f"{self.length} tokens" if self.length is not None else f"a multiple of {self.size}"
            raise DataError(
                f"{self.size} ranks share a sequence in equal parts; got sequences of {tokens} tokens, where "
                f"sp_seq_length and sp_size require {wanted}. Pad them "
                f"(DataCollatorForLanguageModeling(pad_to_multiple_of={self.size}))."
            )
        for name, value in found.items():
            # Tensors with one entry per row stay whole. Labels need one per token, because each rank has only a part.
            least = 1 if name == "labels" else 2
            if isinstance(value, torch.Tensor) and value.dim() >= least and tuple(value.shape[:2]) != (rows, tokens):
                raise DataError(
                    f"With sequence parallelism, tensors of a batch need the dims of input_ids first, ({rows}, "
                    f"{tokens}); got {name} of shape {tuple(value.shape)}. Leave it out of the batch."
                )
        found["position_ids"] = self._positions(found, rows, tokens)
        if isinstance(found.get("labels"), torch.Tensor):
            found["shift_labels"] = shift_labels(found.pop("labels"))  # a part's last label is on the next rank
        each = tokens // self.size
        own = slice(self.rank * each, (self.rank + 1) * each)
        for name, value in found.items():
            if isinstance(value, torch.Tensor) and value.dim() > 1:  # one value per row belongs to all parts
                found[name] = value[:, own].contiguous()
        return found

    def _positions(self, batch: Mapping[str, Any], rows: int, tokens: int) -> torch.Tensor:
        """Return the positions of the tokens, which increase to the end of each row unless sequences are packed."""
        like = batch["input_ids"]
        mask = batch.get("attention_mask")
        real = torch.ones_like(like, dtype=torch.bool)
        if isinstance(mask, torch.Tensor) and mask.shape == like.shape:
            real = mask.to(torch.bool)
            if (real[:, 1:] & ~real[:, :-1]).any():
                raise DataError(
                    "Sequence parallelism does not pass masks to attention, so padding has to follow the tokens; got "
                    "an attention_mask with padding before tokens. Pad on the right."
                )
        every = torch.arange(tokens, device=like.device)
        given = batch.get("position_ids")
        if not isinstance(given, torch.Tensor):
            return every.expand(rows, tokens)
        if self.packs:
            return given
        straight = given[:, :1] + every  # padding may have any position
        if given.shape != like.shape or ((given != straight) & real).any():
            raise DataError(
                "Packed sequences need a flash attention; got position_ids that restart inside a row. Put one "
                "sequence in each row, or use sp_attn_implementation='flash_attention_2'."
            )
        return straight


class _SharedOut:
    """A collate function that returns this rank's part of each batch."""

    def __init__(self, collate_fn: Callable[[Any], Any], sharing: Sharing) -> None:
        self.collate_fn = collate_fn
        self.sharing = sharing

    def __call__(self, samples: object) -> dict[str, Any]:
        """Collate samples, and return this rank's part of the batch."""
        return self.sharing.part_of(self.collate_fn(samples))


class _FilledUp(BatchSampler):
    """Batches of indices, padded with samples from the start to a multiple of a number of batches."""

    def __init__(self, batches: BatchSampler, multiple: int) -> None:
        self.batch_sampler = batches
        self.multiple = multiple
        self.batch_size = batches.batch_size
        self.drop_last = False

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler that the batches are made from."""
        return self.batch_sampler.sampler

    def __len__(self) -> int:
        return -(-len(self.batch_sampler) // self.multiple) * self.multiple

    def __iter__(self) -> Iterator[list[int]]:
        first: list[int] = []
        given = 0
        for batch in self.batch_sampler:
            if given < self.multiple:
                first += batch
            given += 1
            yield [*batch, *itertools.islice(itertools.cycle(first), max(0, self.batch_size - len(batch)))]
        again = itertools.cycle(first)
        for _ in range(-given % self.multiple):
            yield list(itertools.islice(again, self.batch_size))


def adapt(loader: object, layout: Layout, sharing: Sharing, *, fills: bool) -> None:
    """Make a prepared loader return this rank's part of its sequences, in place; an adapted loader stays as it is.

    Raises:
        PreparationError: Another object makes its batches, or ranks would read different numbers of them.
    """
    collate = _collate_of(loader)
    if isinstance(collate, _SharedOut):  # adapted before: parts must not be cut again
        return
    if not isinstance(loader, DataLoaderShard) or not _reads_its_own(loader):
        raise PreparationError(
            "Sequence parallelism needs loaders from which each rank reads its own batches, equally many; got a "
            f"{type(loader).__name__} that batches differently. Use a DataLoader with a batch_size, and "
            "DataLoaderConfiguration(dispatch_batches=False, split_batches=False, even_batches=True)."
        )
    shard, stream = loader.shard, loader.dataset
    made: dict[str, Any] = {}
    if isinstance(stream, IterableDatasetShard):
        whole = IterableDatasetShard(stream.dataset, stream.batch_size, stream.drop_last, layout.replicas, layout.part)
        whole.tells_counts = stream.tells_counts
        made["dataset"] = whole
    elif shard is not None:
        batches = shard.batch_sampler
        if fills and not shard.drop_last and shard.batch_size is not None:  # all groups need equally many batches
            batches = _FilledUp(batches, layout.world_size)
        again = BatchSamplerShard(batches, layout.replicas, layout.part, even_batches=layout.replicas > 1)
        made["batch_sampler" if loader.batch_sampler is shard else "sampler"] = again
    shared_out = _SharedOut(collate, sharing)
    made["collate_fn"] = CountedCollate(shared_out) if isinstance(loader.collate_fn, CountedCollate) else shared_out
    # torch forbids setting this on a loader; it is safe here because reading has not begun.
    loader.__dict__.update(made, _iterator=None)
    loader.settings = dataclasses.replace(loader.settings, parts=layout.parts, cut=True)


def _reads_its_own(loader: DataLoaderShard) -> bool:
    """Return whether each rank reads its own batches, equally many, made of single samples."""
    spec, shard = loader.spec, loader.shard
    shared = isinstance(loader.dataset, IterableDatasetShard) or (
        shard is not None and not isinstance(shard, IndexShard)
    )
    return shared and not (loader.local_ranks or loader._iterates_itself() or spec.split) and spec.even


def feeds_parts() -> bool:
    """Return whether the loader that is being read returns parts of sequences."""
    return isinstance(_collate_of(GradientState().active_dataloader), _SharedOut)


def _collate_of(loader: object) -> Any:
    """Return a loader's collate function, below the one that counts samples of a stream."""
    found = getattr(loader, "collate_fn", None)
    return found.collate_fn if isinstance(found, CountedCollate) else found
