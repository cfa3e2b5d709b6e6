"""What the documentation says of the Accelerator on one process, where the engine's own tests do not show it."""

import gc
import json
import weakref
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


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _plain_steps(windows: list[list[int]], divisor: int | None = None, clip: str | None = None) -> torch.Tensor:
    """Train in plain PyTorch, one step for each window of batches, and return the weights."""
    model, optimizer, loader, schedule = _parts()
    batches = list(loader)
    for window in windows:
        for index in window:
            (_loss(model, batches[index]) / (divisor or len(window))).backward()
        if clip is not None:
            getattr(nn.utils, f"clip_grad_{clip}_")(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return _weights(model)


@pytest.mark.parametrize("kind", [None, "norm", "value"])
def test_accumulate_steps_once_a_window(kind: str | None) -> None:
    """A loop of one batch trains in windows, closed by the end of the data and clipped as torch clips."""
    model, optimizer, loader, schedule = _parts()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    loader, model, optimizer, schedule = accelerator.prepare(loader, model, optimizer, schedule)
    synced = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(_loss(model, batch))
            if kind and accelerator.sync_gradients:
                getattr(accelerator, f"clip_grad_{kind}_")(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            synced.append(accelerator.sync_gradients)
    assert synced == [False, True, True]
    torch.testing.assert_close(_weights(model), _plain_steps([[0, 1], [2]], divisor=2, clip=kind))


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clear", "free_memory"])
def test_memory_is_freed(name: str) -> None:
    """Nothing is held of what was prepared, `step` is 0, and a None comes back for each object."""
    model, optimizer, _, schedule = _parts()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    with accelerator.accumulate(model):
        assert accelerator.step == 1
    held = weakref.ref(model)
    model, optimizer, schedule = getattr(accelerator, name)(model, optimizer, schedule)
    gc.collect()
    assert model is optimizer is schedule is None
    assert held() is None
    assert accelerator.step == 0


def test_hooks_before_saving_and_loading(tmp_path: Path) -> None:
    """Hooks get models, weights and folder, may take weights and models over, and are removed by their handle."""
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1))
    seen: list[str] = []

    def before_saving(models: list[nn.Module], weights: list[dict[str, Any]], input_dir: str) -> None:
        assert models == accelerator._models
        (Path(input_dir) / "mine.json").write_text(json.dumps(weights.pop()["weight"].item()))
        seen.append(str(input_dir))

    def before_loading(models: list[nn.Module], input_dir: str) -> None:
        nn.init.constant_(models.pop().weight, json.loads((Path(input_dir) / "mine.json").read_text()))
        seen.append(str(input_dir))

    handles = [
        accelerator.register_save_state_pre_hook(before_saving),
        accelerator.register_load_state_pre_hook(before_loading),
    ]
    folder = tmp_path / "checkpoint"
    value = model.weight.item()
    accelerator.save_state(str(folder))
    assert not list(folder.glob("model*"))
    nn.init.zeros_(model.weight)
    accelerator.load_state(str(folder))
    assert model.weight.item() == value
    assert len(seen) == 2
    assert seen[1] == str(folder)
    for handle in handles:
        handle.remove()
    accelerator.save_state(str(tmp_path / "plain"))
    accelerator.load_state(str(tmp_path / "plain"))
    assert len(seen) == 2


def test_prepare_places_what_it_is_told_to() -> None:
    """The list for `device_placement` speaks of each object."""
    accelerator = Accelerator()
    prepared = accelerator.prepare(*_parts(), device_placement=[True, True, False, False])
    assert prepared[2].device is None
    assert next(prepared[0].parameters()).device == accelerator.device


def test_prepare_one_by_one() -> None:
    """The four methods for one object each give what `prepare` gives."""
    accelerator = Accelerator()
    model, optimizer, loader, schedule = _parts()
    model = accelerator.prepare_model(model)
    optimizer = accelerator.prepare_optimizer(optimizer, device_placement=True)
    loader = accelerator.prepare_data_loader(loader, device_placement=True)
    schedule = accelerator.prepare_scheduler(schedule)
    for batch in loader:
        accelerator.backward(_loss(model, batch))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    torch.testing.assert_close(_weights(model), _plain_steps([[0], [1], [2]]))


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
