"""The facade on two ranks."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from accel_core.accelerator import Accelerator
from accel_core.errors import ConfigurationError, PreparationError, RemoteRankError, StateError
from accel_core.options.enums import DDPCommunicationHookType, DistributedType
from accel_core.plugins.handlers import DistributedDataParallelKwargs
from accel_core.plugins.parallelism import ParallelismConfig
from accel_testing import requires, world


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def _same_everywhere(accelerator: Accelerator, tensor: torch.Tensor) -> bool:
    rows = accelerator.gather(tensor.detach().flatten()[None])
    return bool((rows == rows[0]).all())


def _told(name: str) -> list[str]:
    """Return the list that messages of a logger come to from now on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    return lines


@requires("torch:2.11")  # older ones give gloo's threads no names
@world(2)
def test_a_model_that_outlives_its_group_does_not_end_it() -> None:
    """Gloo's threads are not joined by the last DDP model, which holds the lock that they wait for."""
    accelerator = Accelerator()
    model = accelerator.prepare(_model())
    accelerator.end_training()
    del model, accelerator
    gc.collect()
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert "pt_gloo_runloop" in names, names


@world(2)
def test_evaluation_first_then_training_is_distributed() -> None:
    """A model prepared for evaluation is wrapped when it is prepared for training later."""
    accelerator = Accelerator()
    model = _model()
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trained, optimizer = accelerator.prepare(model, optimizer)
    assert isinstance(trained, DistributedDataParallel)
    assert accelerator.prepare(model) is trained
    assert accelerator._models == [trained]
    accelerator.backward(trained(torch.full((1, 3), float(accelerator.process_index))).sum())
    optimizer.step()
    assert _same_everywhere(accelerator, model.weight)


@world(2)
def test_no_sync_keeps_gradients_apart_until_the_last_backward() -> None:
    """The next synchronized backward averages what was added up."""
    accelerator = Accelerator()
    assert accelerator.distributed_type is DistributedType.MULTI_CPU
    assert (accelerator.num_processes, accelerator.use_distributed, accelerator.multi_device) == (2, True, True)
    assert accelerator.state.backend == "gloo"
    model = accelerator.prepare(_model())
    x = torch.full((1, 3), float(accelerator.process_index + 1))
    with accelerator.no_sync(model):
        accelerator.backward(model(x).sum())
        assert not _same_everywhere(accelerator, model.module.weight.grad)
    accelerator.backward(model(x).sum())
    torch.testing.assert_close(model.module.weight.grad, torch.full((1, 3), 3.0))


@pytest.mark.parametrize("frozen", ["a part", "all"])
@world(2)
def test_gradients_of_what_was_unfrozen_are_refused(frozen: str) -> None:
    """Parameters that were frozen in `prepare` are averaged by nobody; apart, under no_sync, ranks may train them."""
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    (model[0] if frozen == "a part" else model).requires_grad_(False)
    prepared = accelerator.prepare(model)
    batch = torch.full((2, 3), 1.0 + accelerator.process_index)
    model.requires_grad_(True)
    if frozen == "a part":
        with accelerator.no_sync(prepared):
            accelerator.backward(prepared(batch).sum())
        model.zero_grad()
    with pytest.raises(PreparationError, match=r"that were frozen then: 0\.weight, 0\.bias"):
        accelerator.backward(prepared(batch).sum())


class _Layers(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x.to(layer.weight.dtype))
        return x.float()


_CASTS: dict[str, Callable[[nn.Module], object]] = {
    "double": nn.Module.double,
    "half": nn.Module.half,
    "a layer": lambda model: model[1].to(torch.float64),  # type: ignore[index]
    "there and back": lambda model: model.double().float(),
}


@pytest.mark.parametrize("finds_unused", [False, True])
@pytest.mark.parametrize("cast", _CASTS)
@world(2)
def test_gradients_of_what_was_cast_are_refused(cast: str, finds_unused: bool) -> None:
    """DDP no longer averages them. A cast alone, another model's pass and one under no_sync are not refused."""
    arguments = DistributedDataParallelKwargs(find_unused_parameters=finds_unused)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[arguments])
    model, other = _Layers(nn.Linear(3, 3), nn.Linear(3, 1)), _model()
    prepared, trained = accelerator.prepare(model, other)
    batch = torch.full((2, 3), 1.0 + accelerator.process_index)
    model.to(torch.float32)
    accelerator.backward(prepared(batch).sum())
    assert _same_everywhere(accelerator, model[0].weight.grad)
    model.zero_grad()
    _CASTS[cast](model)
    accelerator.backward(trained(batch).sum())
    with accelerator.no_sync(prepared):
        accelerator.backward(prepared(batch).sum())
    first = "1" if cast == "a layer" else "0"
    with pytest.raises(PreparationError, match=rf"format or device since: {first}\.weight, .* Cast and move"):
        accelerator.backward(prepared(batch).sum())


@pytest.mark.parametrize("explicit", [False, True])
@world(2)
def test_a_static_graph_averages_in_every_pass(explicit: bool) -> None:
    """Gradients that add up over batches are those of a graph that may change; one warning says why that takes more."""
    lines = _told("accel_core.strategies.ddp")
    arguments = DistributedDataParallelKwargs(static_graph=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[arguments], gradient_accumulation_steps=1 if explicit else 2)
    model = accelerator.prepare(_model())
    for _ in range(2):
        for number in range(2):
            context = accelerator.no_sync(model) if number == 0 else nullcontext()
            with context if explicit else accelerator.accumulate(model):
                accelerator.backward(model(torch.full((1, 3), float(accelerator.process_index + number))).sum())
        torch.testing.assert_close(model.module.weight.grad, torch.full((1, 3), 2.0 if explicit else 1.0))
        model.zero_grad()
    assert [line[:23] for line in lines] == ["[RANK 0] A static graph"] * accelerator.is_main_process


@world(2)
def test_sync_of_a_model_that_was_not_prepared_is_refused() -> None:
    """A wrapper that no Accelerator made is an error, not a backward that stays local; a bare model needs nothing."""
    accelerator = Accelerator()
    with accelerator.trigger_sync_in_backward(_model()):
        pass
    with pytest.raises(StateError, match="got a DistributedDataParallel that was not"):
        accelerator.trigger_sync_in_backward(DistributedDataParallel(_model()))


@world(2)
def test_flag_of_one_rank_is_seen_by_all() -> None:
    """Only rank 1 raises it; both see it, once."""
    accelerator = Accelerator()
    if accelerator.process_index == 1:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


@world(2)
def test_main_process_goes_first(tmp_path: Path) -> None:
    """What it wrote is there when the others enter; where it raises it keeps its own error, and the other is told."""
    accelerator = Accelerator()
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            (tmp_path / "ready").touch()
        assert (tmp_path / "ready").exists()
    expected: type[Exception] = KeyError if accelerator.is_main_process else RemoteRankError
    with pytest.raises(expected), accelerator.main_process_first():
        raise KeyError("on purpose")
    accelerator.wait_for_everyone()


@pytest.mark.parametrize(
    "hook",
    [
        DDPCommunicationHookType.FP16,
        pytest.param(DDPCommunicationHookType.POWER_SGD, marks=requires("numpy")),  # torch's hook imports it
    ],
)
@world(2)
def test_communication_hooks_average(hook: DDPCommunicationHookType) -> None:
    """A compressed exchange still leaves the same gradients on all ranks."""
    handler = DistributedDataParallelKwargs(comm_hook=hook)
    accelerator = Accelerator(kwargs_handlers=[handler])
    model = accelerator.prepare(_model())
    accelerator.backward(model(torch.full((1, 3), float(accelerator.process_index))).sum())
    assert _same_everywhere(accelerator, model.module.weight.grad)


@world(2)
def test_ddp_arguments_set_later_are_those_of_the_next_model() -> None:
    """`ddp_handler` counts for models prepared after it was set."""
    accelerator = Accelerator()
    accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    assert accelerator.prepare(_model()).find_unused_parameters
    accelerator.ddp_handler = None
    assert not accelerator.prepare(_model()).find_unused_parameters


@world(2)
def test_uneven_inputs_are_joined() -> None:
    """A rank with more batches goes on; weights, moments and rates behind the epoch are those of all steps made."""
    accelerator, data = Accelerator(), [torch.full((3,), float(i)) for i in range(5)]
    model, plain = _model(), _model()
    plain.load_state_dict(model.state_dict())
    made = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain)]
    schedules = [torch.optim.lr_scheduler.StepLR(each, 4) for each in made]
    model, optimizer, schedule, loader = accelerator.prepare(
        model, made[0], schedules[0], DataLoader(data, batch_size=1)
    )
    for _ in range(2):
        batches = 0
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for batch in loader:
                accelerator.backward(model(batch).sum())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                batches += 1
        assert accelerator.gather(torch.tensor([batches])).tolist() == [3, 2]
        assert loader.batch_sampler.even_batches
        for at in range(0, 5, 2):
            (sum(plain(each).sum() for each in data[at : at + 2]) / 2).backward()
            made[1].step()
            schedules[1].step()
            schedules[1].step()
            made[1].zero_grad()
    assert torch.allclose(accelerator.unwrap_model(model).weight, plain.weight)
    assert schedule.get_last_lr() == schedules[1].get_last_lr()


@world(2)
def test_parts_of_an_input_cover_it() -> None:
    """split_between_processes gives each rank its part."""
    accelerator = Accelerator()
    with accelerator.split_between_processes(["a", "b", "c"]) as part:
        assert part == (["a", "b"] if accelerator.process_index == 0 else ["c"])
    with accelerator.split_between_processes(["a", "b", "c"], apply_padding=True) as part:
        assert part == (["a", "b"] if accelerator.process_index == 0 else ["c", "c"])


@world(2)
def test_bf16_and_compilation_train_together() -> None:
    """Mixed precision, a compiled model and two ranks: weights stay the same everywhere, and learn."""
    accelerator = Accelerator(mixed_precision="bf16", dynamo_backend="eager")
    model = _model()
    before = model.weight.detach().clone()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(prepared(torch.full((1, 3), float(accelerator.process_index + 1))).sum())
    optimizer.step()
    assert _same_everywhere(accelerator, model.weight)
    assert not torch.equal(before, model.weight)
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model


@world(2)
def test_replicas_of_a_mesh_train_data_parallel() -> None:
    """A mesh of replicas only is plain data parallel, and names this process's place on its axis."""
    accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2))
    assert accelerator.distributed_type is DistributedType.MULTI_CPU
    assert accelerator.data_parallel_rank == accelerator.process_index
    assert accelerator.torch_device_mesh.size() == 2
    assert (accelerator.tensor_parallel_rank, accelerator.context_parallel_rank) == (0, 0), "axes that it has not"
    with pytest.raises(KeyError, match="mesh_dim_name"):
        accelerator.torch_device_mesh["tp"]
    config = accelerator.parallelism_config
    assert accelerator.torch_device_mesh is config.get_device_mesh(), "laid out once"
    second = Accelerator()
    assert second.parallelism_config is config
    assert second.torch_device_mesh is second._runtime.mesh is accelerator.torch_device_mesh


@world(2)
def test_mesh_of_another_size_is_refused() -> None:
    """Axes that do not multiply to the number of processes are an error on every rank, before anything is set up."""
    for sizes, ranks in (({"dp_replicate_size": 3}, 3), ({"ep_size": 2, "tp_size": 2}, 4)):
        with pytest.raises(ConfigurationError, match=f"multiply to the number of processes; got {ranks} and 2 process"):
            Accelerator(parallelism_config=ParallelismConfig(**sizes))
    assert not torch.distributed.is_initialized()


@world(2)
def test_model_spread_over_devices_is_refused() -> None:
    """A device map over several devices and several processes exclude one another."""
    model = _model()
    model.hf_device_map = {"a": 0, "b": 1}
    with pytest.raises(PreparationError, match="spread over 0, 1"):
        Accelerator().prepare(model)


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.full("compiled once more")), 2])
@world(2)
def test_model_compiled_before_prepare_trains_as_one_process(accumulation: int) -> None:
    """Two ranks that prepare a compiled model end with the weights of one process over all the data."""
    model = _model()
    expected = _model()
    data = torch.arange(24.0).reshape(8, 3) / 24
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in data.split(2 * accumulation):
        plain.zero_grad()
        expected(step).square().mean().backward()
        plain.step()
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    compiled, optimizer = accelerator.prepare(
        torch.compile(model, backend="eager"), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    assert isinstance(compiled._orig_mod, DistributedDataParallel)
    for batch in data[accelerator.process_index :: 2].split(1):
        with accelerator.accumulate(compiled):
            accelerator.backward(compiled(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
    assert accelerator.unwrap_model(compiled) is not compiled
    assert isinstance(compiled._orig_mod, DistributedDataParallel), "unwrapping leaves the compiled model as it is"
    assert accelerator.get_state_dict(compiled).keys() == model.state_dict().keys()


@world(2)
def test_released_models_go_while_the_accelerator_lives() -> None:
    """A wrapper holds its model; the strategy holds neither."""
    accelerator = Accelerator()
    model = accelerator.prepare(_model())
    gone = weakref.ref(model.module)
    (model,) = accelerator.free_memory(model)
    gc.collect()
    assert gone() is None


@world(2)
def test_gradients_that_nobody_averages_are_warned_of() -> None:
    """One warning on the main process where no model was prepared, or the loss went around those that were."""
    told = _told("accel_core")
    accelerator, model = Accelerator(), _model()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(2):
        accelerator.backward(model(torch.ones(3)).sum())
        optimizer.step()
    assert len(told) == int(accelerator.is_main_process), told
    assert all("nothing averages their gradients" in text for text in told)
    told.clear()
    prepared = accelerator.prepare(model)
    accelerator.backward(prepared(torch.ones(1, 3)).sum())
    assert told == []
    again, model = Accelerator(), _model()
    again.prepare(model)  # and its result is dropped
    for _ in range(2):
        again.backward(model(torch.ones(3)).sum())
    assert len(told) == int(again.is_main_process), told
    assert all("model, optimizer, loader = accelerator.prepare(" in text for text in told)
