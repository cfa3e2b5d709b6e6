"""Gather, reduce, broadcast and pad on real gloo ranks."""

import pytest
import torch

from accel_core.accelerator import Accelerator
from accel_core.comm import collectives, objects, padding, transport
from accel_core.errors import (
    CollectiveError,
    ConfigurationError,
    RankDisagreementError,
)
from accel_core.process.world import ensure
from accel_testing import world

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.uint16,
    torch.float8_e4m3fn,
]


def tensor_of(dtype, rank, shape=(2, 3)):
    """Return a tensor of small numbers that differ between ranks."""
    count = 1
    for size in shape:
        count *= size
    return (torch.arange(count).reshape(shape) + 2 * rank).to(dtype)


@world(2)
def test_gather_keeps_every_dtype():
    """A nest with every dtype comes back concatenated, bit for bit."""
    rank = ensure().rank
    nest = {str(dtype): tensor_of(dtype, rank) for dtype in DTYPES}
    gathered = collectives.gather(nest)
    for dtype in DTYPES:
        expected = torch.cat([tensor_of(dtype, 0), tensor_of(dtype, 1)])
        assert gathered[str(dtype)].dtype == dtype
        assert gathered[str(dtype)].view(torch.uint8).equal(expected.view(torch.uint8))


@world(2)
def test_gather_of_odd_tensors():
    """Tensors without dims, empty, strided or with a gradient are gathered like any other; lists and tuples meet."""
    rank = ensure().rank
    nest = {
        "scalar": torch.tensor(rank + 0.5),
        "empty": torch.zeros(0, 3),
        "strided": torch.arange(6).reshape(2, 3).t() + rank,
        "grad": torch.ones(2, requires_grad=True) * (rank + 1),
        "parameter": torch.nn.Parameter(torch.ones(1)),
    }
    gathered = collectives.gather(nest)
    assert gathered["scalar"].tolist() == [0.5, 1.5]
    assert gathered["empty"].shape == (0, 3)
    assert gathered["strided"].tolist() == [[0, 3], [1, 4], [2, 5], [1, 4], [2, 5], [3, 6]]
    assert gathered["grad"].tolist() == [1.0, 1.0, 2.0, 2.0]
    assert not gathered["grad"].requires_grad
    assert type(gathered["parameter"]) is torch.Tensor
    sequence = (torch.ones(1),) if rank else [torch.ones(1)]
    gathered = collectives.gather(sequence)
    assert type(gathered) is type(sequence)
    assert gathered[0].tolist() == [1.0, 1.0]


@world(2)
def test_nests_of_one_shape():
    """Tensors of one shape, also without dims or elements, come back apart, each with memory of its own."""
    rank = ensure().rank
    for shape in ((2, 3), (), (0, 2), (5,)):
        for turn in range(3):
            nest = {name: torch.full(shape, float(rank + turn + place)) for place, name in enumerate("abcdef")}
            other = {name: torch.full(shape, float(1 - rank + turn + place)) for place, name in enumerate("abcdef")}
            gathered, summed = collectives.gather(nest), collectives.reduce(nest, "sum")
            for name in nest:
                parts = [nest[name], other[name]] if rank == 0 else [other[name], nest[name]]
                expected = torch.cat([part if part.dim() else part[None] for part in parts])
                assert gathered[name].equal(expected)
                assert summed[name].equal(parts[0] + parts[1])
                assert gathered[name].untyped_storage().nbytes() == expected.nbytes
                assert summed[name].untyped_storage().nbytes() == nest[name].nbytes
    first = collectives.gather([torch.full((1,), float(rank))] * 4)
    collectives.gather([torch.full((1,), 9.0)] * 4)
    assert first[3].tolist() == [0.0, 1.0], "a later operation does not write into earlier results"


@world(2)
def test_one_collective_for_many_tensors():
    """Sixty-four small tensors of three dtypes cost one collective, and so does their reduction."""
    ensure()
    nest = [torch.ones(3, dtype=[torch.float32, torch.int64, torch.bool][place % 3]) for place in range(64)]
    number = torch.distributed.group.WORLD._get_sequence_number_for_group
    before = number()
    collectives.gather(nest)
    assert number() == before + 1
    collectives.reduce(nest, "sum")
    assert number() == before + 2


@world(4)
def test_reduce_equals_arithmetic():
    """Sum, mean and maximum over four ranks are those of the stacked tensors, for every dtype that has them."""
    rank = ensure().rank
    for dtype in DTYPES:
        parts = torch.stack([tensor_of(dtype, other).to(torch.complex128) for other in range(4)])
        total = collectives.reduce([tensor_of(dtype, rank)], "sum")[0]
        assert total.dtype == dtype
        if dtype is torch.bool:
            assert total.equal(parts.real.bool().any(0))
        elif dtype.itemsize > 1 or not dtype.is_floating_point:
            assert total.to(torch.complex128).equal(parts.sum(0))
        if (dtype.is_floating_point and dtype.itemsize > 1) or dtype.is_complex:
            mean = collectives.reduce(tensor_of(dtype, rank))
            assert mean.to(torch.complex128).equal(parts.mean(0))
        if dtype.is_complex:
            with pytest.raises(
                CollectiveError, match=r"largest of complex.*got torch.complex64 at \['z'\]. Reduce its"
            ):
                collectives.reduce({"z": tensor_of(dtype, rank)}, "max")
        else:
            largest = collectives.reduce({"a": (tensor_of(dtype, 3 - rank),)}, "max")["a"][0]
            assert largest.to(torch.float64).equal(parts.real.amax(0)) or dtype is torch.bool
            assert largest.dtype == dtype


@world(2)
def test_reduce_larger_than_a_frame():
    """A reduction through all_reduce gives what one through the frame gives, for every dtype."""
    rank = ensure().rank
    size = transport.largest_frame(2)
    for dtype in DTYPES:
        small = tensor_of(dtype, rank)
        large = small.reshape(-1).repeat(size // small.numel() + 1)
        for reduction in ("sum",) if dtype.is_complex else ("sum", "max"):
            expected = collectives.reduce(small, reduction).reshape(-1)
            total = collectives.reduce(large, reduction)
            assert total[:6].view(torch.uint8).equal(expected.view(torch.uint8)), dtype
            assert total[-6:].view(torch.uint8).equal(expected.view(torch.uint8)), dtype
    for odd in (0, 1):
        value = torch.nan if rank == odd else 1.0
        for size in (1, 100_000):
            assert collectives.reduce(torch.full((size,), value), "max").isnan().all()


@world(2)
def test_arguments_that_cannot_be_are_refused_on_every_rank():
    """The mean of integers, an unknown reduction and a source that is not a rank; the next call works."""
    ensure()
    with pytest.raises(
        CollectiveError, match=r"no mean of their own dtype; got torch.int64 at \['n'\].*reduction='sum'"
    ):
        collectives.reduce({"n": torch.ones(2, dtype=torch.int64)}, "mean")
    for word in ("average", "min", None):
        with pytest.raises(ConfigurationError, match=rf"got {word!r}. Use one of mean, sum, max, none"):
            collectives.reduce(torch.ones(1), word)
    with pytest.raises(ConfigurationError, match=r"got 2 with 2 ranks"):
        collectives.broadcast(torch.ones(1), from_process=2)
    assert collectives.gather(torch.ones(1)).tolist() == [1.0, 1.0]


@world(2)
def test_broadcast_overwrites_the_others():
    """Everybody holds the source's values afterwards, in the tensors they passed, small or large."""
    rank = ensure().rank
    for size in (3, 100_000):
        nest = {
            "a": torch.full((size,), float(rank)),
            "n": [torch.tensor(rank)],
            "p": torch.nn.Parameter(torch.ones(2) * rank),
        }
        result = collectives.broadcast(nest, from_process=1)
        assert result is nest
        assert nest["a"].equal(torch.ones(size))
        assert nest["n"][0].item() == 1
        assert nest["p"].tolist() == [1.0, 1.0]


@world(2)
def test_pad_then_gather():
    """Ranks with different sizes gather after padding, at either end and along any dim."""
    rank = ensure().rank
    nest = {"a": torch.ones(2 + rank, 1, dtype=torch.int64), "b": [torch.ones(1, 3 - rank)], "s": torch.tensor(1.0)}
    padded = padding.pad_across_processes(nest, dim=0, pad_index=7)
    assert padded["a"].shape == (3, 1)
    assert padded["a"].dtype == torch.int64
    assert padded["a"].flatten().tolist() == [1, 1, 1 if rank else 7]
    assert padded["b"][0] is nest["b"][0]
    assert padded["s"] is nest["s"]
    front = padding.pad_across_processes(nest["b"], dim=-1, pad_index=5, pad_first=True)
    assert front[0].tolist() == ([[5.0, 1.0, 1.0]] if rank else [[1.0, 1.0, 1.0]])
    assert collectives.gather(front)[0].shape == (2, 3)
    assert padding.pad_across_processes(torch.ones(2 + rank), dim=3).shape == (2 + rank,)


@world(2)
def test_pad_with_a_value_that_the_dtype_cannot_hold():
    """The tensor is promoted on every rank, also on the one that needs no padding, so gather works."""
    rank = ensure().rank
    padded = padding.pad_across_processes(torch.ones(1 + rank, dtype=torch.bool), pad_index=-100)
    assert padded.dtype == torch.int64
    assert collectives.gather(padded).tolist() == [1, -100, 1, 1]
    for dtype, value in ((torch.uint8, 300), (torch.uint16, -1), (torch.int8, 2**40)):
        padded = padding.pad_across_processes(torch.ones(1 + rank, dtype=dtype), pad_index=value)
        assert collectives.gather(padded).tolist() == [1, value, 1, 1]
    for dtype, value in ((torch.int64, 2**63), (torch.uint64, -1)):
        with pytest.raises(ConfigurationError, match=f"got {dtype} and pad_index={value}"):
            padding.pad_across_processes(torch.ones(1 + rank, dtype=dtype), pad_index=value)
        equal = torch.ones(2, dtype=dtype)
        assert padding.pad_across_processes(equal, pad_index=value) is equal
    kept = padding.pad_across_processes(torch.ones(1 + rank, dtype=torch.bool))
    assert collectives.gather(kept).tolist() == [True, False, True, True]


@world(2)
def test_shapes_of_all_ranks():
    """Every rank learns every rank's shape, with any number of dims."""
    rank = ensure().rank
    shapes = padding.gather_tensor_shape(torch.zeros([2 + rank] * (rank + 1)))
    assert shapes == [torch.Size([2]), torch.Size([3, 3])]


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ("torch.ones(3)", "torch.ones(4)"),
        ("torch.ones(3)", "torch.ones(3, dtype=torch.float64)"),
        ("torch.ones(2, 3)", "torch.ones(3, 2)"),
        ("torch.ones(3)", "torch.ones(300_000)"),
        ("[torch.ones(3)]", "[torch.ones(3), torch.ones(3)]"),
        ("{'a': torch.ones(3)}", "{'b': torch.ones(3)}"),
        ("[]", "torch.ones(3)"),
    ],
)
@world(2)
def test_disagreement_is_an_error_on_every_rank(mine, other):
    """Shapes, dtypes or structures that differ raise everywhere, name each rank's view, and the next call works."""
    rank = ensure().rank
    nest = eval(other if rank else mine)
    for operation in (collectives.gather, collectives.reduce, collectives.broadcast):
        with pytest.raises(RankDisagreementError) as caught:
            operation(nest)
        message = str(caught.value)
        assert "rank 0: " in message
        assert "rank 1: " in message
        assert "test_collectives.py:" in message
        assert "Give every rank the same structure, shapes and dtypes" in message
    assert collectives.gather(torch.tensor(rank)).tolist() == [0, 1]


@world(2)
def test_the_message_names_what_differs():
    """Only the parts that differ are shown, each with its path, dtype and shape."""
    rank = ensure().rank
    with pytest.raises(RankDisagreementError) as caught:
        collectives.gather({"same": torch.ones(2), "logits": [torch.ones(3 + rank, 5)]})
    message = str(caught.value)
    assert "['logits'][0]: float32[3, 5]" in message
    assert "['logits'][0]: float32[4, 5]" in message
    assert "same" not in message.replace("the same structure", "")


@world(2)
def test_operations_first_used_in_inference_mode():
    """What an operation keeps for the next one serves in every mode, whichever it was made in."""
    here = ensure()
    nest = [torch.full((2,), float(here.rank))] * 5

    def everything(share):
        assert collectives.gather(nest)[0].tolist() == [0.0, 0.0, 1.0, 1.0]
        assert collectives.reduce(nest, "sum")[0].tolist() == [1.0, 1.0]
        assert collectives.reduce(torch.ones(share), "max").sum().item() == share
        assert collectives.broadcast(torch.tensor([float(here.rank)]), 1).item() == 1.0
        assert objects.gather_object([share]) == [share] * 2
        accelerator.set_trigger()
        assert accelerator.check_trigger()

    accelerator = Accelerator(cpu=True)
    with torch.inference_mode():
        everything(70_000)
    everything(3)
    with torch.no_grad():
        everything(70_000)
    with torch.inference_mode():
        everything(3)
