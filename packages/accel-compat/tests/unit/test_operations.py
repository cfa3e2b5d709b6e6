"""Nests of tensors as Accelerate describes and fills them, in one process."""

import pytest
import torch

from accel_core.errors import CollectiveError
from accelerate import _operations as operations

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_batch_size_of_what_has_none() -> None:
    """Where no batch size can be found, the answer is None, not an error."""
    assert operations.ignorant_find_batch_size([torch.ones(3, 2)]) == 3
    assert operations.ignorant_find_batch_size({"a": "text"}) is None
    assert operations.ignorant_find_batch_size([]) is None


def test_structure_without_values() -> None:
    """A nest's shapes and dtypes can be sent, and tensors made from them."""
    nest = {"a": [torch.ones(2, 3), torch.ones((), dtype=torch.int32)]}
    structure = operations.get_data_structure(nest)
    assert structure["a"][0] == operations.TensorInformation(torch.Size([2, 3]), torch.float32)
    assert operations.is_tensor_information(structure["a"][1])
    made = operations.initialize_tensors(structure)
    assert [(tensor.shape, tensor.dtype) for tensor in made["a"]] == [(t.shape, t.dtype) for t in nest["a"]]
    assert operations.get_shape(nest) == {"a": [[2, 3], []]}


def test_dtype_numbers() -> None:
    """Every dtype has its number, and every number its dtype."""
    assert {dtype: number for number, dtype in operations.TENSOR_INT_TO_DTYPE.items()} == operations.TENSOR_TYPE_TO_INT
    assert operations.TENSOR_TYPE_TO_INT[torch.bool] == 10


def test_gathered_parameters_without_an_engine() -> None:
    """Parameters that nobody sharded are whole already."""
    parameter = torch.nn.Parameter(torch.ones(2))
    with operations.GatheredParameters([parameter], modifier_rank=0):
        assert parameter.shape == (2,)


def test_copy_with_one_process() -> None:
    """The only process keeps its tensor, and has to have one."""
    assert operations.copy_tensor_to_devices(torch.ones(1)).item() == 1
    with pytest.raises(CollectiveError, match="No rank holds a tensor"):
        operations.copy_tensor_to_devices(None)
