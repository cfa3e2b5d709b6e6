"""Loaders on a GPU: copies beside the computation give the same batches."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_core.data.prepare import prepare_data_loader
from accel_core.process import world

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("fresh_state"),
]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_batches_arrive_whole(non_blocking, workers):
    """Under load on the computation's stream, every batch holds its own values."""
    device = torch.device("cuda", 0)
    data = TensorDataset(torch.arange(64 * 4096, dtype=torch.float32).view(64, 4096))
    loader = prepare_data_loader(
        DataLoader(data, batch_size=4, pin_memory=True, num_workers=workers),
        device,
        1,
        0,
        put_on_device=True,
        non_blocking=non_blocking,
    )
    busy = torch.randn(2048, 2048, device=device)
    sums = []
    for (batch,) in loader:
        assert batch.device == device
        for _ in range(5):
            busy = torch.tanh(busy @ busy)
        sums.append(batch.double().sum())
        del batch
    expected = data.tensors[0].view(16, -1).double().sum(1)
    assert torch.equal(torch.stack(sums).cpu(), expected)
    assert world.current() is None or world.current().size == 1
