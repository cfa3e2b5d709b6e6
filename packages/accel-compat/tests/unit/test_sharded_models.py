"""Models that are spread over a mesh."""

import torch

from accelerate._sharded_models import get_model_tp_size, model_has_dtensor


def test_plain_model_is_not_spread() -> None:
    """A model of plain tensors has neither a DTensor nor a tensor-parallel size."""
    model = torch.nn.Linear(1, 1)
    assert not model_has_dtensor(model)
    assert get_model_tp_size(model) is None
    model.tp_size = 4
    assert get_model_tp_size(model) == 4
