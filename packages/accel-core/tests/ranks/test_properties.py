"""Collectives on nests that hypothesis makes up, against plain torch in one process."""

import copy
from collections import OrderedDict, UserDict, namedtuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from accel_core.comm import collectives, padding
from accel_core.comm.tree import leaf_paths, recursively_apply
from accel_core.errors import RankDisagreementError
from accel_core.process.world import ensure
from accel_testing import world

Pair = namedtuple("Pair", "left right")
FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WHOLE = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
EVERYWHERE = settings(
    max_examples=40,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
"""Ranks have to draw the same examples: a fixed seed, no database, and no shrinking, which each would do alone."""

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
leaves = st.tuples(shapes, st.sampled_from(FLOATING + WHOLE), st.booleans())
nests = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.sampled_from(["a", "b", 1, None]), inner, max_size=3),
        st.dictionaries(st.sampled_from(["x", "y"]), inner, max_size=2).map(OrderedDict),
        st.dictionaries(st.sampled_from(["x", "y"]), inner, max_size=2).map(UserDict),
    ),
    max_leaves=12,
)


def is_plan(value):
    """Tell whether a leaf says how to make a tensor."""
    return isinstance(value, tuple) and len(value) == 3 and isinstance(value[1], torch.dtype)


def build(plan, rank):
    """Make the nest that a rank brings: small whole numbers, so that sums are exact in every dtype."""
    if is_plan(plan):
        shape, dtype, strided = plan
        count = 1
        for size in shape:
            count *= size
        tensor = ((torch.arange(count) + 3 * rank) % 7).reshape(shape).to(dtype)
        return tensor.t().contiguous().t() if strided and tensor.dim() == 2 else tensor
    if isinstance(plan, Pair):
        return Pair(*(build(item, rank) for item in plan))
    if isinstance(plan, (list, tuple)):
        return type(plan)(build(item, rank) for item in plan)
    made = copy.copy(plan)
    for key, value in plan.items():
        made[key] = build(value, rank)
    return made


def same(one, other):
    """Tell whether two nests have the same containers and bit-equal tensors."""
    pairs = zip(leaf_paths(one), leaf_paths(other), strict=True)
    return type(one) is type(other) and all(
        path == other_path and type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.equal(b)
        for (path, a), (other_path, b) in pairs
    )


def joined(nests_of_ranks, join):
    """Join nests of ranks tensor by tensor."""
    columns = [[leaf for _, leaf in leaf_paths(nest)] for nest in nests_of_ranks]
    results = iter([join(list(column)) for column in zip(*columns, strict=True)])
    return recursively_apply(lambda _: next(results), nests_of_ranks[0])


def concatenated(column):
    """Put tensors one after the other; one without dims counts as one of one element."""
    return torch.cat([tensor if tensor.dim() else tensor[None] for tensor in column])


def summed(column):
    """Add tensors up in their own dtype; booleans by or."""
    wide = torch.stack([tensor.to(torch.float64) for tensor in column]).sum(0)
    return wide.to(column[0].dtype)


@pytest.mark.parametrize("operation", ["gather", "reduce", "broadcast", "pad"])
@world(3)
def test_operations_equal_plain_torch(operation):
    """Any nest comes back as plain torch, given every rank's nest, would make it, and what was passed is unchanged."""
    here = ensure()

    @seed(17)
    @EVERYWHERE
    @given(plan=nests, source=st.integers(0, here.size - 1))
    def check(plan, source):
        everywhere = [build(plan, rank) for rank in range(here.size)]
        mine = build(plan, here.rank)
        if operation == "gather":
            assert same(collectives.gather(mine), joined(everywhere, concatenated))
        elif operation == "reduce":
            assert same(collectives.reduce(mine, "sum"), joined(everywhere, summed))
        elif operation == "broadcast":
            assert same(collectives.broadcast(mine, source), everywhere[source])
            return
        else:
            assert same(padding.pad_across_processes(mine), mine)
        assert same(mine, everywhere[here.rank])

    check()


@world(2)
def test_ragged_tensors_gather_after_padding():
    """Tensors of any sizes, padded along their first dim, gather to what padding by hand gives."""
    here = ensure()

    @seed(23)
    @EVERYWHERE
    @given(
        lengths=st.lists(st.integers(0, 5), min_size=here.size, max_size=here.size),
        width=st.integers(0, 3),
        dtype=st.sampled_from(FLOATING + WHOLE),
        in_front=st.booleans(),
        value=st.integers(0, 1),
    )
    def check(lengths, width, dtype, in_front, value):
        parts = [torch.ones(length, width).to(dtype) for length in lengths]
        padded = []
        for part in parts:
            filling = torch.full((max(lengths) - len(part), width), value).to(dtype)
            padded.append(torch.cat([filling, part] if in_front else [part, filling]))
        mine = padding.pad_across_processes(parts[here.rank], pad_index=value, pad_first=in_front)
        assert collectives.gather(mine).equal(torch.cat(padded))

    check()


@world(2)
def test_any_difference_is_found():
    """Two nests that differ in structure, shape or dtype raise on both ranks; equal ones never do."""
    here = ensure()

    def signature(plan):
        nest = build(plan, 0)
        return [(path, leaf.dtype, leaf.shape) for path, leaf in leaf_paths(nest)]

    @seed(29)
    @EVERYWHERE
    @given(plans=st.tuples(nests, nests), operation=st.sampled_from(["gather", "reduce", "broadcast"]))
    def check(plans, operation):
        call = getattr(collectives, operation)
        arguments = ("sum",) if operation == "reduce" else ()
        mine = build(plans[here.rank], here.rank)
        if signature(plans[0]) != signature(plans[1]):
            with pytest.raises(RankDisagreementError, match=r"rank 0: .*\n  rank 1: "):
                call(mine, *arguments)
        else:
            call(build(plans[0], here.rank), *arguments)

    check()


@world(4)
def test_sizes_around_the_frame():
    """Payloads below, at and above every size that a frame takes give exact results while frames grow and shrink."""
    here = ensure()

    @seed(31)
    @settings(EVERYWHERE, max_examples=60)
    @given(nbytes=st.one_of(st.integers(0, 400_000), st.sampled_from([4064, 4065, 32_736, 32_737, 131_040, 131_041])))
    def check(nbytes):
        mine = torch.full((nbytes,), here.rank, dtype=torch.uint8)
        gathered = collectives.gather({"a": mine, "n": torch.tensor(nbytes)})
        assert gathered["n"].tolist() == [nbytes] * here.size
        assert gathered["a"].equal(torch.arange(here.size, dtype=torch.uint8).repeat_interleave(nbytes))
        assert collectives.reduce(mine, "sum").equal(torch.full((nbytes,), 6, dtype=torch.uint8))

    check()
