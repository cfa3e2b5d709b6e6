"""Ties that a model declares by name are placed like ties that it has."""

import random
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from accel_bigmodel.device_map.balance import get_balanced_memory
from accel_bigmodel.device_map.check import device_of
from accel_bigmodel.device_map.infer import infer_auto_device_map
from accel_bigmodel.device_map.tree import build_tree
from accel_core.errors import DeviceMapError


def grown(seed: int, declared: bool) -> nn.Module:
    """Make a tree of layers in which some are tied: as one parameter, or by names alone."""
    draw = random.Random(seed)

    def grow(level: int) -> nn.Module:
        if level == 0 or draw.random() < 0.3:
            return nn.Linear(draw.randint(1, 6), draw.randint(1, 6), bias=False, device="meta")
        return nn.Sequential(*[grow(level - 1) for _ in range(draw.randint(1, 3))])

    model = nn.Sequential(*[grow(draw.randint(0, 3)) for _ in range(draw.randint(2, 4))])
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    names = list(layers)
    keys = {}
    for name in names[1:]:
        if draw.random() < 0.3:
            source = names[0]
            weight = layers[source].weight
            layers[name].weight = nn.Parameter(torch.empty_like(weight)) if declared else weight
            keys[re.escape(name)] = re.escape(source)
    if declared:
        model._tied_weights_keys = keys
    return model


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_declared_ties_are_placed_like_real_ones(seed: int) -> None:
    """Random trees: the map of a model that names its ties is the map of the same model that has them."""
    total = build_tree(grown(seed, declared=False)).root.size
    draw = random.Random(seed)
    limits = {0: int(total * draw.uniform(0.1, 0.8)), 1: int(total * draw.uniform(0.1, 0.8)), "cpu": total}
    maps = [infer_auto_device_map(grown(seed, declared), limits) for declared in (True, False)]
    assert maps[0] == maps[1]
    balanced = [get_balanced_memory(grown(seed, declared), limits) for declared in (True, False)]
    assert balanced[0] == balanced[1]


class Words(nn.Module):
    """Embeddings, layers between, two heads per step, and a head like the embeddings."""

    def __init__(self, keys: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4, device="meta")
        self.layers = nn.ModuleList([nn.Linear(4, 4, device="meta") for _ in range(3)])
        self.steps = nn.ModuleList([nn.Sequential(nn.Linear(4, 2, device="meta")) for _ in range(3)])
        self.head = nn.Linear(4, 10, bias=False, device="meta")
        self._tied_weights_keys = keys

    def get_input_embeddings(self) -> nn.Module:
        """Return the embeddings."""
        return self.embed


STEPS = {"steps.0.0.weight", "steps.1.0.weight", "steps.2.0.weight"}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (None, []),
        ({"head.weight": "embed.weight"}, [{"embed.weight", "head.weight"}]),
        ({"head": "embed"}, [{"embed.weight", "head.weight"}]),
        ({r"steps.(?![0])\d+": "^steps.0"}, [{"steps.0.0.bias", "steps.1.0.bias", "steps.2.0.bias"}, STEPS]),
        ([r"steps\.\d+\.0\.weight"], [STEPS]),
        (["head.weight", "embed.weight"], [{"embed.weight", "head.weight"}]),
        ({"layers.0": "steps.0.0"}, []),
        ({"head": "nothing"}, []),
        ({"head": "embed", r"layers\.2": r"layers\.1"}, [
            {"embed.weight", "head.weight"},
            {"layers.1.bias", "layers.2.bias"},
            {"layers.1.weight", "layers.2.weight"},
        ]),
    ],
)  # fmt: skip
def test_names_and_expressions(keys: Any, expected: list[set[str]]) -> None:
    """Names of tensors, names of modules and expressions tie what has one shape; each group counts once."""
    model = Words(keys)
    tree = build_tree(model)
    found = [{leaf.name for leaf in group} for group in tree.ties]
    assert sorted(found, key=sorted) == sorted(expected, key=sorted)
    tensors = dict(model.named_parameters())
    saved = sum((len(group) - 1) * tensors[next(iter(group))].nbytes for group in expected)
    assert tree.root.size == sum(tensor.nbytes for tensor in tensors.values()) - saved
    device_map = infer_auto_device_map(model, {0: tree.root.size // 2, 1: tree.root.size}, clean_result=False)
    for group in expected:
        assert len({device_of(name, device_map) for name in group}) == 1


def test_a_configuration_that_ties_nothing_is_heeded() -> None:
    """What a transformers class names as tied is so only if the configuration, or what was made of it, says so."""
    model = Words({"head.weight": "embed.weight"})
    model.config = type("Config", (), {"tie_word_embeddings": False})()
    assert build_tree(model).ties == []
    model.all_tied_weights_keys = {"head.weight": "embed.weight"}
    assert len(build_tree(model).ties) == 1


def test_a_broken_expression_is_named() -> None:
    """What is no regular expression is an error that shows it."""
    with pytest.raises(DeviceMapError, match=r"got 'head\('"):
        build_tree(Words({"head(": "embed"}))
