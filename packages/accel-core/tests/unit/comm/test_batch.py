"""Sizes, slices, joins and moves of nests in one process."""

from collections import namedtuple

import pytest
import torch

from accel_core.comm import batch, collectives, control, objects, padding
from accel_core.errors import ConfigurationError, DataError, UnsupportedTypeError

Pair = namedtuple("Pair", "left right")
pytestmark = pytest.mark.usefixtures("fresh_state")


class Movable:
    """Something that moves itself, with or without non_blocking."""

    def __init__(self, takes_non_blocking):
        self.takes_non_blocking = takes_non_blocking

    def to(self, device, **kwargs):
        """Say where it was moved."""
        if kwargs and not self.takes_non_blocking:
            raise TypeError("unexpected keyword")
        return ("moved", device, kwargs)


def test_send_to_device_moves_what_can_move():
    """Tensors and whatever has `to` are moved; strings, numbers and skipped keys stay."""
    one = torch.ones(1)
    nest = {"a": one, "b": Pair([one], "text"), "c": {"a": one}, "d": Movable(True), "e": Movable(False)}
    moved = batch.send_to_device(nest, "meta", non_blocking=True, skip_keys="a")
    assert moved["a"] is one
    assert moved["c"]["a"] is one
    assert moved["b"].left[0].device.type == "meta"
    assert moved["b"].right == "text"
    assert moved["d"] == ("moved", "meta", {"non_blocking": True})
    assert moved["e"] == ("moved", "meta", {})
    assert batch.send_to_device((one,), "meta", skip_keys=["a"])[0].device.type == "meta"


def test_batch_size():
    """The batch size is the first size of the first tensor, however deep."""
    assert batch.find_batch_size({"a": [torch.ones(2, 3)], "b": torch.ones(5)}) == 2
    with pytest.raises(DataError, match="empty <class 'dict'>"):
        batch.find_batch_size({})
    with pytest.raises(UnsupportedTypeError, match="got <class 'str'>"):
        batch.find_batch_size(["text"])
    with pytest.raises(UnsupportedTypeError, match="a tensor without dims"):
        batch.find_batch_size(torch.tensor(1))


def test_device():
    """The device is that of the first tensor."""
    assert batch.find_device([1, {"a": torch.ones(1, device="meta")}, torch.ones(1)]) == torch.device("meta")
    assert batch.find_device([1, "x"]) is None


def test_listify_makes_numbers():
    """Tensors of any dtype become plain numbers."""
    nest = {"a": torch.tensor([1.5], dtype=torch.bfloat16), "b": [torch.tensor(True)], "c": "x"}
    assert batch.listify(nest) == {"a": [1.5], "b": [True], "c": "x"}


def test_slice_and_concatenate_are_inverse():
    """A batch cut in two and joined is the batch, in its own containers."""
    nest = {"a": torch.arange(10).reshape(5, 2), "b": Pair(torch.arange(5), [torch.arange(5.0)])}
    parts = [batch.slice_tensors(nest, slice(0, 2)), batch.slice_tensors(nest, slice(2, 5), 1, 2)]
    joined = batch.concatenate(parts)
    assert joined["a"].equal(nest["a"])
    assert type(joined["b"]) is Pair
    assert joined["b"].right[0].equal(nest["b"].right[0])
    wide = batch.concatenate([torch.ones(2, 1), torch.ones(2, 3)], dim=1)
    assert wide.shape == (2, 4)
    with pytest.raises(UnsupportedTypeError, match="Only tensors can be concatenated; got <class 'str'>"):
        batch.concatenate([{"a": "x"}, {"a": "y"}])
    assert batch.concatenate([{"a": "x", "b": [torch.ones(1), None]}]) == {"a": "x", "b": [torch.ones(1), None]}
    with pytest.raises(DataError, match="Nothing to concatenate"):
        batch.concatenate([])


@pytest.mark.parametrize(("size", "processes", "expected"), [(5, 2, 6), (4, 2, 4), (1, 4, 4), (7, 3, 9)])
def test_batches_are_filled_with_zeros(size, processes, expected):
    """A batch grows to the next multiple of the number of processes, by zeros at the end."""
    filled = batch.pad_input_tensors({"a": torch.ones(size, 2), "b": [torch.ones(size)]}, size, processes)
    assert filled["a"].shape == (expected, 2)
    assert filled["a"].sum().item() == size * 2
    assert filled["b"][0].tolist() == [1.0] * size + [0.0] * (expected - size)
    across = batch.pad_input_tensors(torch.ones(2, size), size, processes, dim=1)
    assert across.shape == (2, expected)


def test_one_process_gives_back_what_it_got():
    """With one process operations are identities; a reduction is a copy."""
    nest = {"a": torch.ones(2, requires_grad=True), "b": torch.tensor(1)}
    assert collectives.gather(nest) is nest
    assert collectives.broadcast(nest) is nest
    assert padding.pad_across_processes(nest)["a"] is nest["a"]
    for reduction in ("mean", "sum", "max"):
        reduced = collectives.reduce(nest, reduction)
        assert reduced["a"] is not nest["a"]
        assert reduced["a"].equal(nest["a"])
        assert reduced["b"].item() == 1
    assert collectives.reduce(nest, "sum", scale=2.0)["b"].item() == 1, "the scale is for XLA"
    assert objects.gather_object("anything") == "anything"
    assert objects.broadcast_object_list([1]) == [1]
    assert padding.gather_tensor_shape(torch.ones(2, 3)) == [torch.Size([2, 3])]
    control.agree(None, "save")
    with pytest.raises(OSError, match="disk full"):
        control.agree(OSError("disk full"), "save")


def test_one_process_refuses_what_several_refuse():
    """Leaves that are no tensors and unknown reductions are refused with one process too."""
    with pytest.raises(UnsupportedTypeError):
        collectives.reduce({"a": "text"})
    with pytest.raises(UnsupportedTypeError):
        padding.pad_across_processes({"a": 1})
    with pytest.raises(ConfigurationError, match="got 'average'"):
        collectives.reduce(torch.ones(1), "average")
    with pytest.raises(ConfigurationError, match=r"got 'min'\. Use one of mean, sum, max, none"):
        collectives.reduce(torch.ones(1), "min")


def test_nested_tensors_are_left_alone():
    """Torch's nested tensors cannot be padded and are warned of."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.warns(padding.CannotPadNestedTensorWarning, match="to_padded_tensor"):
        assert padding.pad_across_processes(nested) is nested
