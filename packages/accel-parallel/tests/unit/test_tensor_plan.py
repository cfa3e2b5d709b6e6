"""Plans of tensor parallel that do not fit a model or the number of ranks; nothing is split."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from accel_core.errors import PreparationError
from accel_parallel.tensor.plan import TensorPlan, plan_of

GATHERED = "colwise_gather_output"


class Attention(nn.Module):
    """The projections of attention: six heads of queries and two of keys, of four features each."""

    head_dim = 4

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.qkv, self.o_proj = nn.Linear(8, 72), nn.Linear(24, 8)


class Model(nn.Module):
    """Attention, an embedding that is tied to the head, and a layer of seven columns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([Attention()])
        self.act, self.odd = nn.Tanh(), nn.Linear(8, 7)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight


class Planned(Model):
    """The same with a plan of its own, and a configuration."""

    tp_plan = {"layers.*.q_proj": "colwise", "layers.*.k_proj": "colwise"}
    config = SimpleNamespace(num_attention_heads=6, num_key_value_heads=2)


def untouched(model: nn.Module, plan: Any, size: int) -> TensorPlan:
    """Return the plan of a model, whose parameters are what they were, refused or not."""
    before = dict(model.named_parameters(remove_duplicate=False))
    try:
        return plan_of(model, plan, size)
    finally:
        after = dict(model.named_parameters(remove_duplicate=False))
        assert after.keys() == before.keys()
        assert all(after[name] is before[name] for name in after)


@pytest.mark.parametrize(
    ("plan", "size", "words"),
    [
        ({"layers.*.q_proj": "colwise"}, 4, r"got 6 of layers\.0\.q_proj, each of 4 features, and 4 ranks"),
        ({"layers.*.k_proj": ColwiseParallel()}, 4, r"got 2 of layers\.0\.k_proj"),
        ({"layers.*.o_proj": "rowwise"}, 4, r"got 6 of layers\.0\.o_proj"),
        ({"layers.*.qkv": "colwise"}, 2, r'got layers\.0\.qkv, .* "colwise_gather_output"'),
        ({"odd": "colwise"}, 2, "out_features=7 of odd and 2 ranks"),
        ({"act": "colwise"}, 2, "got act, a Tanh"),
        ({"odd": "diagonal"}, 2, "got 'diagonal' for 'odd'"),
        # As Mixtral's own plan has it for stacked experts.
        ({"layers.*.qkv": "packed_colwise"}, 2, r"got 'packed_colwise' for 'layers\.\*\.qkv'.* distributed_config="),
        ({"odd": "rowwise", "od*": "rowwise"}, 2, r"two patterns for odd, the second of them 'od\*'"),
        ({"head": "colwise"}, 2, r"got embed\.weight, head\.weight\. Name all"),
        ({"head": "colwise", "embed": "embedding_colwise"}, 2, r"got embed\.weight, head\.weight\. Name all"),
        (
            {"layer.*.q_prj": "colwise"},
            2,
            r"'layer\.\*\.q_prj', .* names are layers\.\*\.q_proj, layers\.\*\.[ko]_proj",
        ),
        ("auto", 2, "got Model, which has none"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: Any, size: int, words: str) -> None:
    """Heads, sizes, ties, packed columns, styles and names that do not fit are named, and nothing is changed."""
    with pytest.raises(PreparationError, match=words):
        untouched(Model(), plan, size)


@pytest.mark.parametrize("size", [3, 4])
def test_a_models_own_plan_divides_its_heads(size: int) -> None:
    """Heads of queries that four ranks do not divide, and of keys that neither divides, are named."""
    uneven = {"num_attention_heads": 6, "num_key_value_heads": 2} if size == 4 else {"num_key_value_heads": 2}
    with pytest.raises(PreparationError, match=f"got {uneven} of Planned and {size} ranks"):
        untouched(Planned(), "auto", size)
    assert len(untouched(Planned(), "auto", 2).styles) == 2


def test_what_fits_is_split() -> None:
    """Whole heads, columns that are gathered again, and ties that are cut alike, are taken."""
    plan = {
        "layers.*.q_proj": "colwise",
        "layers.*.o_proj": "rowwise",
        "layers.*.qkv": GATHERED,
        "head": GATHERED,
        "embed": "embedding_rowwise",
        "act": SequenceParallel(),
    }
    found = untouched(Model(), plan, 2)
    assert {name: type(style) for name, style in found.styles} == {
        "layers.0.q_proj": ColwiseParallel,
        "layers.0.o_proj": RowwiseParallel,
        "layers.0.qkv": ColwiseParallel,
        "head": ColwiseParallel,
        "embed": RowwiseParallel,
        "act": SequenceParallel,
    }
    assert found.ties == (("embed.weight", "head.weight"),)
    assert untouched(Model(), {"layers.*.q_proj": GATHERED}, 4).styles, "its heads come together again"


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (torch.zeros(32, 1, dtype=torch.uint8), r"is \(32, 1\) in torch.uint8"),
        (torch.zeros(8, 8, dtype=torch.int8), r"is \(8, 8\) in torch.int8"),
    ],
)
def test_packed_weights_are_refused(packed: torch.Tensor, words: str) -> None:
    """Layers whose weights are packed in 4 or 8 bits are named with the shape and format of what they hold."""
    layer = nn.Linear(8, 8, bias=False)
    layer.weight = nn.Parameter(packed, requires_grad=False)
    with pytest.raises(PreparationError, match=f"got 0, a Linear whose weight of .*{words}"):
        untouched(nn.Sequential(layer), {"0": "colwise"}, 2)
