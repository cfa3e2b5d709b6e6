"""What the documentation says of the Accelerator on one process, where the engine's own tests do not show it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration, dispatch_model
from accelerate.utils import set_seed

pytestmark = pytest.mark.usefixtures("fresh_state")


def _parts(samples: int = 6, batch_size: int = 2) -> tuple[nn.Linear, torch.optim.SGD, DataLoader[Any], Any]:
    """Return a model, its optimizer, a loader and a schedule, the same at every call."""
    set_seed(3)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(samples, 2), torch.randn(samples, 1))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return model, optimizer, DataLoader(data, batch_size=batch_size), schedule


def _loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def test_what_one_process_does_not_need_changes_nothing() -> None:
    """Calls for several processes, meshes, scalers and precisions leave loaders, batches and gradients alone."""
    model, optimizer, loader, _ = _parts()
    accelerator = Accelerator()
    loader, model, optimizer = accelerator.prepare(loader, model, optimizer)
    assert accelerator.deepspeed_ulysses_dl_adapter(loader, model) is loader
    accelerator.wait_for_everyone()
    first, second = next(iter(loader)), next(iter(loader))
    whole = [each.clone() for each in first]
    with accelerator.maybe_context_parallel(buffers=first, buffer_seq_dims=[1, 1], no_restore_buffers=set(first)):
        pass
    torch.testing.assert_close(first, whole)
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    with accelerator.no_sync(model):
        accelerator.backward(_loss(model, first))
    with accelerator.join_uneven_inputs([model], even_batches=False), accelerator.trigger_sync_in_backward(model):
        accelerator.backward(_loss(model, second))
    accelerator.unscale_gradients(optimizer=optimizer)
    accelerator.unscale_gradients()
    once, _, batches, _ = _parts()
    (2 * _loss(once, next(iter(batches)))).backward()
    torch.testing.assert_close(model.weight.grad, once.weight.grad)


def test_prepare_places_what_it_is_told_to() -> None:
    """The list for `device_placement` speaks of each object."""
    accelerator = Accelerator()
    prepared = accelerator.prepare(*_parts(), device_placement=[True, True, False, False])
    assert prepared[2].device is None
    assert next(prepared[0].parameters()).device == accelerator.device


def test_verify_device_map(tmp_path: Path) -> None:
    """A model that a device map spreads is told from one that is whole."""
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    assert not accelerator.verify_device_map(model)
    spread = dispatch_model(model, {"0": "cpu", "1": "disk"}, main_device="cpu", offload_dir=tmp_path)
    assert accelerator.verify_device_map(spread)


ATTRIBUTES = {
    "device": torch.device("cpu"),
    "num_processes": 1,
    "process_index": 0,
    "local_process_index": 0,
    "is_main_process": True,
    "is_local_main_process": True,
    "is_last_process": True,
    "use_distributed": False,
    "mixed_precision": "no",
    "sync_gradients": True,
    "split_batches": False,
    "even_batches": True,
    "use_seedable_sampler": False,
    "optimizer_step_was_skipped": False,
    "gradient_accumulation_steps": 1,
}


def test_attributes_are_those_of_the_run() -> None:
    """Every attribute has the value of one process on a CPU, or what the configuration of loaders says."""
    plain = Accelerator(cpu=True)
    assert {name: getattr(plain, name) for name in ATTRIBUTES} == ATTRIBUTES
    config = DataLoaderConfiguration(use_seedable_sampler=True, even_batches=False, non_blocking=True)
    told = Accelerator(cpu=True, dataloader_config=config)
    assert (told.use_seedable_sampler, told.even_batches, told.non_blocking) == (True, False, True)
