"""The three views."""

import array
import collections
import pickle
from collections import OrderedDict, defaultdict

import pytest
import torch

from accel_core.accelerator import Accelerator
from accel_core.comm.split import split_for_rank
from accel_core.errors import ConfigurationError, DataError, StateError, StateResetError, UnsupportedTypeError
from accel_core.host.environ import patch_environment
from accel_core.options.enums import DistributedType
from accel_core.state import AcceleratorState, PartialState, is_initialized
from accel_testing import requires

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_every_partial_state_is_one() -> None:
    """Instances share one real dict, which a reset empties."""
    assert PartialState._shared_state == {}
    first, second = PartialState(), PartialState()
    assert first.__dict__ is second.__dict__ is PartialState._shared_state
    assert (first.num_processes, first.process_index, first.device.type) == (1, 0, "cpu")
    assert first.distributed_type is DistributedType.NO
    assert not first.use_distributed
    assert pickle.loads(pickle.dumps(first)).num_processes == 1
    PartialState._reset_state()
    assert PartialState._shared_state == {}


def test_old_object_after_a_reset_says_so() -> None:
    """Its attributes, and what needs the other processes, are a named error, which hasattr and getattr understand."""
    process, run = PartialState(), Accelerator().state
    AcceleratorState._reset_state(reset_partial_state=True)
    for state in (process, run):
        name = type(state).__name__
        wanted = rf"^`{name}` object has no attribute `device`\. This happens if the \w+'s state was reset while"
        with pytest.raises(StateResetError, match=wanted):
            _ = state.device
        assert not hasattr(state, "num_processes")
        assert getattr(state, "num_processes", 7) == 7
    for ask in (process.wait_for_everyone, process.local_main_process_first, lambda: repr(process)):
        with pytest.raises(StateResetError, match="no attribute `distributed_type`"):
            ask()
    assert PartialState._shared_state == {}


def test_state_of_a_run_before_there_is_one_is_refused() -> None:
    """It is a ValueError, and the Accelerator that is made next still chooses the precision."""
    with pytest.raises(StateError, match="got no Accelerator yet") as caught:
        AcceleratorState()
    assert isinstance(caught.value, ValueError)
    assert not is_initialized()
    state = PartialState()
    PartialState._reset_state()
    with pytest.raises(StateError, match="on_main_process needs to know the processes") as caught:
        state.on_main_process(print)
    assert isinstance(caught.value, ValueError)
    assert Accelerator(mixed_precision="bf16").state.mixed_precision == "bf16"


@requires("engine:deepspeed")
def test_label_follows_the_environment_of_the_moment() -> None:
    """Consumers set ACCELERATE_USE_DEEPSPEED for a moment and read the label."""
    with patch_environment(ACCELERATE_USE_DEEPSPEED="true"):
        assert PartialState().distributed_type is DistributedType.DEEPSPEED


def test_second_precision_is_refused() -> None:
    """One process trains in one precision, also where the environment chose it, in any case of letters."""
    with patch_environment(ACCELERATE_MIXED_PRECISION="BF16"):
        Accelerator()
    assert is_initialized()
    with pytest.raises(ConfigurationError, match=r"'fp16'.*'bf16'"):
        AcceleratorState(mixed_precision="fp16")
    assert AcceleratorState().mixed_precision == "bf16"


def test_reset_of_the_run_keeps_the_process() -> None:
    """Only reset_partial_state also forgets the process."""
    Accelerator()
    AcceleratorState._reset_state()
    assert PartialState._shared_state != {}
    Accelerator()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == {}


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        ([1, 2, 3], DataError, r"'prompts': 2.*'scale': 3"),
        (7.5, UnsupportedTypeError, "got float at 'scale'"),
        (torch.tensor(7.5), UnsupportedTypeError, "got Tensor at 'scale'"),
        (None, UnsupportedTypeError, "got NoneType at 'scale'"),
    ],
)
def test_a_dict_that_cannot_be_divided_is_refused(value: object, error: type[Exception], said: str) -> None:
    """The error names each key's length, or the key whose value has none."""
    with pytest.raises(error, match=said):
        split_for_rank({"prompts": ["a", "b"], "scale": value}, 0, 2)


def test_arrays_are_split_as_tensors_are() -> None:
    """Labels in an array stay beside the prompts that they belong to."""
    np = pytest.importorskip("numpy", reason="needs numpy, which accel-core does not")
    whole = {"prompts": ["a", "b", "c"], "labels": np.array([[1], [2], [3]])}
    part = split_for_rank(whole, 1, 2, apply_padding=True)
    assert part["prompts"] == ["c", "c"]
    assert part["labels"].tolist() == [[3], [3]]
    assert split_for_rank(np.ones((0, 2)), 1, 2).shape == (0, 2)


@pytest.mark.parametrize(
    "whole", [range(3), collections.deque([0, 1, 2]), array.array("i", [0, 1, 2]), collections.UserList([0, 1, 2])]
)
def test_any_sequence_is_split_as_a_list_is(whole: object) -> None:
    """Each rank gets its part as a list, padded where that is asked for, alone and in a dict."""
    assert [split_for_rank(whole, rank, 2) for rank in range(2)] == [[0, 1], [2]]
    assert split_for_rank(whole, 1, 2, apply_padding=True) == [2, 2]
    assert split_for_rank(collections.UserDict(a=whole), 1, 2) == {"a": [2]}


@pytest.mark.slow
def test_a_table_is_split_by_its_rows() -> None:
    """A frame of pandas gives its rows, although it is indexed by columns."""
    pandas = pytest.importorskip("pandas", reason="needs pandas, which accel-core does not")
    assert split_for_rank(pandas.DataFrame([[1, 2], [3, 4], [5, 6]]), 1, 2).values.tolist() == [[5, 6]]


@pytest.mark.parametrize("whole", [7, torch.tensor(7.5), None, iter([1]), {1, 2}])
def test_what_cannot_be_split_is_refused(whole: object) -> None:
    """What has no length or no order is named; a text and bytes are one input, and one process splits nothing."""
    with pytest.raises(UnsupportedTypeError, match=rf"got {type(whole).__name__}\. Pass a list"):
        split_for_rank(whole, 0, 2)
    assert split_for_rank(whole, 0, 1) is whole
    assert (split_for_rank("text", 0, 2), split_for_rank(b"bytes", 1, 2)) == ("text", b"bytes")


def test_split_of_a_dict_keeps_its_class() -> None:
    """A part of a dict is of the dict's class, and keeps what makes values for missing keys."""
    whole = defaultdict(list, a=[1, 2, 3])
    part = split_for_rank(whole, 1, 2)
    assert (type(part), part["a"], part["missing"]) == (defaultdict, [3], [])
    assert whole == {"a": [1, 2, 3]}
    assert type(split_for_rank(OrderedDict(a=[1, 2]), 0, 2)) is OrderedDict


@pytest.mark.parametrize("length", range(9))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_split_covers_everything_once(length: int, size: int) -> None:
    """Parts in rank order are the input; padded parts have one length."""
    whole = list(range(length))
    parts = [split_for_rank(whole, rank, size) for rank in range(size)]
    assert [item for part in parts for item in part] == whole
    padded = [split_for_rank(torch.arange(length), rank, size, apply_padding=True) for rank in range(size)]
    assert len({len(part) for part in padded}) == 1
