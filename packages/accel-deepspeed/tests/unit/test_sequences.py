"""Batches that are cut along their sequences, and loaders that give the parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_core.data.prepare import prepare_data_loader
from accel_core.errors import DataError, PreparationError
from accel_core.mesh.layout import Layout
from accel_deepspeed.sequences import Sharing, adapt

Batch = dict[str, Any]


def batch(rows: int = 2, tokens: int = 6) -> Batch:
    """Return token ids that tell their place."""
    ids = torch.arange(rows * tokens).view(rows, tokens)
    return {"input_ids": ids, "labels": ids.clone(), "name": "a", "weight": torch.ones(rows)}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parts_are_the_batch(size: int) -> None:
    """Side by side, the parts are the batch: tokens, positions, and labels that were shifted before they were cut."""
    whole = batch()
    parts = [Sharing(rank, size).part_of(whole) for rank in range(size)]
    joined = {name: torch.cat([part[name] for part in parts], 1) for name in ("input_ids", "position_ids")}
    torch.testing.assert_close(joined["input_ids"], whole["input_ids"])
    torch.testing.assert_close(joined["position_ids"], torch.arange(6).expand(2, 6))
    shifted = torch.cat([part["shift_labels"] for part in parts], 1)
    torch.testing.assert_close(shifted[:, :-1], whole["labels"][:, 1:])
    assert shifted[:, -1].tolist() == [-100, -100]
    for part in parts:
        assert part["name"] == "a"
        assert part["weight"].shape == (2,)
        assert "labels" not in part
    assert "labels" in whole, "the user's batch stays as it is"


def test_padding_behind_the_tokens_is_let_through() -> None:
    """Positions go on through padding at the end; with an attention that reads them, a row may be several sequences."""
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 1], [0, 1, 2, 3]])
    given = batch(tokens=4) | {"attention_mask": mask, "position_ids": positions}
    found = Sharing(1, 2).part_of(given)
    assert found["position_ids"].tolist() == [[2, 3], [2, 3]]
    assert found["attention_mask"].tolist() == [[1, 0], [1, 1]]
    packed = batch(tokens=4) | {"position_ids": torch.tensor([[0, 1, 0, 1]] * 2)}
    assert Sharing(1, 2, packs=True).part_of(packed)["position_ids"].tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda given: [1, 2], r"got list\. Return a dict"),
        (lambda given: {"labels": given["labels"]}, r"got \['labels'\]"),
        (lambda given: batch(tokens=5), r"got sequences of 5 tokens.*a multiple of 2.*pad_to_multiple_of=2"),
        (lambda given: given | {"extra": torch.ones(2, 3)}, r"got extra of shape \(2, 3\)"),
        (lambda given: given | {"labels": torch.ones(2)}, r"got labels of shape \(2,\)"),
        (lambda given: given | {"attention_mask": torch.tensor([[0, 1, 1, 1]] * 2)}, r"padding before tokens"),
        (lambda given: given | {"position_ids": torch.tensor([[0, 1, 0, 1]] * 2)}, r"restart inside a row"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(change: Callable[[Batch], object], words: str) -> None:
    """What would be computed wrongly is named, with what to do; so is another length than all sequences have."""
    with pytest.raises(DataError, match=words):
        Sharing(0, 2).part_of(change(batch(tokens=4)))
    assert Sharing(0, 2, length=4).part_of(batch(tokens=4))["input_ids"].shape == (2, 2)
    with pytest.raises(DataError, match=r"got sequences of 6 tokens.*require 4 tokens"):
        Sharing(0, 2, length=4).part_of(batch(tokens=6))


class Numbers(IterableDataset[Batch]):
    """A stream of sequences."""

    def __iter__(self) -> Any:
        return ({"input_ids": torch.tensor([number, number + 1])} for number in range(9))


def reads(rank: int, *, fills: bool, stream: bool = False) -> list[list[int]]:
    """Return the first tokens of the batches that a rank of four reads, of which pairs share sequences."""
    layout = Layout.of(rank, 4, {"dp_shard": 2, "sp": 2})
    data: Any = Numbers() if stream else list(Numbers())
    loader: Any = prepare_data_loader(DataLoader(data, batch_size=2), layout=Layout.of(rank, 4), dispatch_batches=False)
    plain = None if stream else len(loader)
    adapt(loader, layout, Sharing(layout.place(("sp",)), 2), fills=fills)
    adapt(loader, layout, Sharing(layout.place(("sp",)), 2), fills=fills)  # once more changes nothing
    found = [each["input_ids"].flatten().tolist() for each in loader]
    assert stream or len(found) == len(loader)
    assert not fills or len(loader) == 2 * (plain or 0)
    return found


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("stream", [False, True])
def test_ranks_that_share_sequences_read_the_same(stream: bool) -> None:
    """Pairs read the same rows, each its part of them, in the order of one process; the last batch is filled up."""
    assert reads(0, fills=False, stream=stream) == [[0, 1], [4, 5], [8, 0]]
    assert reads(1, fills=False, stream=stream) == [[1, 2], [5, 6], [9, 1]]
    assert reads(2, fills=False, stream=stream) == [[2, 3], [6, 7], [1, 2]]
    if not stream:  # filled up, an epoch has twice as many batches as the loader said before it was adapted
        assert reads(0, fills=True) == [[0, 1], [4, 5], [8, 0], [2, 3]]
        assert reads(2, fills=True) == [[2, 3], [6, 7], [0, 1], [4, 5]]


def test_loaders_that_cannot_be_cut_are_refused() -> None:
    """Batches that rank 0 makes for all, or that the user makes, cannot be cut by each rank."""
    layout = Layout.of(0, 4, {"dp_shard": 2, "sp": 2})
    for loader in (
        DataLoader(list(Numbers()), batch_size=2),
        prepare_data_loader(DataLoader(list(Numbers()), batch_size=None), layout=Layout.of(0, 4)),
        prepare_data_loader(DataLoader(list(Numbers()), batch_size=4), layout=Layout.of(0, 4), split_batches=True),
    ):
        with pytest.raises(PreparationError, match="batches differently"):
            adapt(loader, layout, Sharing(0, 2), fills=False)
