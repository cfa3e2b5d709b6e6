"""What the documentation of the Accelerator says and shows, on one process: a test for each method and example."""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_testing import requires
from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    dispatch_model,
    load_checkpoint_in_model,
    skip_first_batches,
)
from accelerate.utils import (
    AutocastKwargs,
    GradientAccumulationPlugin,
    ProfileKwargs,
    ProjectConfiguration,
    set_seed,
)

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


def _plain_steps(windows: list[list[int]], divisor: int | None = None, clip: Any = None) -> torch.Tensor:
    """Train in plain PyTorch, one step for each window of batches, and return the weights."""
    model, optimizer, loader, schedule = _parts()
    batches = list(loader)
    for window in windows:
        for index in window:
            (_loss(model, batches[index]) / (divisor or len(window))).backward()
        if clip is not None:
            clip(model.parameters())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return _weights(model)


def test_accumulate_steps_once_a_window() -> None:
    """In `accumulate` the loop of one batch trains in windows, and the end of the data closes the last."""
    model, optimizer, loader, schedule = _parts()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    loader, model, optimizer, schedule = accelerator.prepare(loader, model, optimizer, schedule)
    synced = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(_loss(model, batch))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            synced.append(accelerator.sync_gradients)
    assert synced == [False, True, True]
    torch.testing.assert_close(_weights(model), _plain_steps([[0, 1], [2]], divisor=2))


def test_accumulation_plugin_and_steps_are_one_or_the_other() -> None:
    """Giving both the number of steps and the plugin that holds it is an error."""
    with pytest.raises(ValueError, match=r"gradient_accumulation"):
        Accelerator(gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3))


def test_accumulation_can_go_on_over_the_end_of_the_data() -> None:
    """Without `sync_with_dataloader` a window goes on into the next epoch."""
    model, optimizer, loader, _ = _parts()
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    loader, model, optimizer = accelerator.prepare(loader, model, optimizer)
    synced = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(_loss(model, batch))
                synced.append(accelerator.sync_gradients)
    assert synced == [False, True] * 3


def test_autocast_computes_in_the_precision_asked_for() -> None:
    """Inside `autocast` a matrix product is in bf16, outside and without mixed precision in fp32."""
    weight = torch.ones(2, 2)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    with accelerator.autocast():
        assert (weight @ weight).dtype is torch.bfloat16
        with accelerator.autocast(autocast_handler=AutocastKwargs(enabled=False)):
            assert (weight @ weight).dtype is torch.float32
    assert (weight @ weight).dtype is torch.float32


def test_autocast_without_mixed_precision_changes_nothing() -> None:
    """Where no mixed precision is enabled the block is as outside."""
    with Accelerator(cpu=True).autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_backward_divides_by_the_steps() -> None:
    """The gradient of one of two batches counts half."""
    model, *_ = _parts()
    batch = [torch.ones(2, 2), torch.ones(2, 1)]
    _loss(model, batch).backward()
    expected = model.weight.grad
    model.weight.grad = None
    accelerator = Accelerator(gradient_accumulation_steps=2)
    accelerator.backward(_loss(model, batch))
    torch.testing.assert_close(model.weight.grad, expected / 2)


def test_a_trigger_is_read_once() -> None:
    """A trigger that is set is seen by the next check, and by that one alone."""
    accelerator = Accelerator()
    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


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


@pytest.mark.parametrize("kind", ["norm", "value"])
def test_gradients_are_clipped(kind: str) -> None:
    """Clipping through the Accelerator equals torch's own, at the end of each window."""
    model, optimizer, loader, schedule = _parts()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    loader, model, optimizer, schedule = accelerator.prepare(loader, model, optimizer, schedule)
    clip = getattr(accelerator, f"clip_grad_{kind}_")
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(_loss(model, batch))
            if accelerator.sync_gradients:
                clip(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    torchs = getattr(nn.utils, f"clip_grad_{kind}_")
    expected = _plain_steps([[0, 1], [2]], divisor=2, clip=lambda parameters: torchs(parameters, 0.1))
    torch.testing.assert_close(_weights(model), expected)


def test_clipping_returns_the_norm_before() -> None:
    """The total norm of the gradients, seen as one vector, comes back."""
    model, *_ = _parts()
    model(torch.ones(1, 2)).sum().backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
    torch.testing.assert_close(Accelerator().clip_grad_norm_(model.parameters(), 0.5), expected)


@requires("tensorboard")
def test_trackers_are_found_and_ended(tmp_path: Path) -> None:
    """A tracker that was initialized is found by name, logs, and has its files after `end_training`."""
    accelerator = Accelerator(log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("my_project", config={"lr": 0.1})
    tracker = accelerator.get_tracker("tensorboard")
    assert tracker.name == "tensorboard"
    assert tracker in accelerator.trackers
    assert hasattr(accelerator.get_tracker("tensorboard", unwrap=True), "add_scalar")
    accelerator.log({"loss": 1.0}, step=0)
    accelerator.end_training()
    assert list((tmp_path / "my_project").rglob("events.out.tfevents.*"))


def test_gather_on_one_process() -> None:
    """What one process gathers is its own tensor, in the nest it came in."""
    accelerator = Accelerator()
    gathered = accelerator.gather({"index": [torch.tensor([accelerator.process_index])]})
    assert gathered["index"][0].tolist() == [0]


def test_gather_for_metrics_of_a_first_batch() -> None:
    """A batch taken from a loader without a loop is gathered as it is."""
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(9), batch_size=5))  # type: ignore[arg-type]
    assert accelerator.gather_for_metrics(next(iter(loader))).tolist() == list(range(5))


def test_gather_for_metrics_of_objects() -> None:
    """Whatever can be pickled is gathered with `use_gather_object`."""
    assert Accelerator().gather_for_metrics(["a", {"b": 1}], use_gather_object=True) == ["a", {"b": 1}]


def test_state_dict_of_a_prepared_model() -> None:
    """The state dict has the plain names, with `unwrap` or without."""
    accelerator = Accelerator()
    net = nn.Linear(2, 2)
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    net = accelerator.prepare(net)
    for unwrap in (True, False):
        found = accelerator.get_state_dict(net, unwrap=unwrap)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_join_uneven_inputs_on_one_process_is_a_plain_loop() -> None:
    """Where nobody has to wait, the block changes nothing."""
    model, optimizer, loader, _ = _parts()
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with accelerator.join_uneven_inputs([model], even_batches=False):
        assert len([_loss(model, batch) for batch in loader]) == 3


def test_save_state_and_load_state(tmp_path: Path) -> None:
    """Weights, the optimizer's momentum, the schedule, random states and registered objects come back."""

    class CustomObject:
        def __init__(self) -> None:
            self.count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    accelerator = Accelerator()
    model, optimizer, loader, schedule = accelerator.prepare(*_parts())
    obj = CustomObject()
    accelerator.register_for_checkpointing(obj)
    for batch in loader:
        accelerator.backward(_loss(model, batch))
        optimizer.step()
        schedule.step()
        obj.count += 1
    accelerator.save_state(output_dir=str(tmp_path / "my_checkpoint"))
    weights, rate, drawn = _weights(model).clone(), schedule.get_last_lr(), torch.rand(2)
    with torch.no_grad():
        model.weight.zero_()
    schedule.step()
    obj.count = 0
    accelerator.load_state(str(tmp_path / "my_checkpoint"))
    assert torch.equal(_weights(model), weights)
    assert schedule.get_last_lr() == rate
    assert obj.count == 3
    assert torch.equal(torch.rand(2), drawn)


def test_registered_objects_need_both_functions() -> None:
    """An object that cannot save and load its state is refused when it is registered."""
    with pytest.raises(ValueError, match=r"state_dict"):
        Accelerator().register_for_checkpointing(object())


def test_checkpoints_name_themselves(tmp_path: Path) -> None:
    """With automatic naming folders are numbered below `checkpoints`, and the oldest goes beyond the limit."""
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    model = accelerator.prepare(nn.Linear(1, 1))
    for value in range(3):
        nn.init.constant_(model.weight, value)
        accelerator.save_state()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    nn.init.constant_(model.weight, 7)
    accelerator.load_state()
    assert model.weight.item() == 2


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


@pytest.mark.parametrize("name", ["main_process_first", "local_main_process_first"])
def test_first_process_goes_first_alone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On one process the block is entered at once."""
    accelerator = Accelerator()
    with getattr(accelerator, name)():
        print(f"This will be printed by process {accelerator.process_index}")  # noqa: T201  what it is about
    assert capsys.readouterr().out == "This will be printed by process 0\n"


def test_lomo_backward_needs_a_lomo_optimizer() -> None:
    """A backward pass of LOMO is refused where no such optimizer was prepared."""
    accelerator = Accelerator()
    model, _ = accelerator.prepare(*_parts()[:2])
    with pytest.raises(ValueError, match=r"(?i)lomo"):
        accelerator.lomo_backward(model(torch.ones(1, 2)).sum(), learning_rate=0.1)


def test_context_parallel_has_no_effect_without_a_mesh() -> None:
    """Without context parallelism the block leaves its buffers whole and raises nothing."""
    accelerator = Accelerator()
    batch = {"input_ids": torch.arange(8).reshape(1, 8), "attention_mask": torch.ones(1, 8)}
    with accelerator.maybe_context_parallel(
        buffers=list(batch.values()), buffer_seq_dims=[1, 1], no_restore_buffers={batch["input_ids"]}
    ):
        assert batch["input_ids"].shape == (1, 8)
    assert batch["input_ids"].flatten().tolist() == list(range(8))


def test_ulysses_adapter_leaves_loaders_without_sequences() -> None:
    """A loader is changed for sequence parallelism only where there is some."""
    accelerator = Accelerator()
    model, _, loader, _ = _parts()
    model, loader = accelerator.prepare(model, loader)
    assert accelerator.deepspeed_ulysses_dl_adapter(loader, model) is loader


def test_no_sync_without_data_parallelism_changes_nothing() -> None:
    """On one process gradients add up over both passes."""
    model, optimizer, loader, _ = _parts()
    accelerator = Accelerator()
    loader, model, optimizer = accelerator.prepare(loader, model, optimizer)
    first, second = next(iter(loader)), next(iter(loader))
    with accelerator.no_sync(model):
        accelerator.backward(_loss(model, first))
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(_loss(model, second))
    once, _, batches, _ = _parts()
    batch = next(iter(batches))
    (2 * _loss(once, batch)).backward()
    torch.testing.assert_close(model.weight.grad, once.weight.grad)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("on_main_process", None),
        ("on_local_main_process", None),
        ("on_last_process", None),
        ("on_process", {"process_index": 0}),
        ("on_local_process", {"local_process_index": 0}),
    ],
)
def test_decorators_for_one_process(name: str, arguments: dict[str, int] | None) -> None:
    """A decorated function runs where it is meant to and returns its value."""
    accelerator = Accelerator()
    decorate = getattr(accelerator, name)
    decorated = (decorate if arguments is None else decorate(**arguments))(lambda word: f"printed {word}")
    assert decorated("once") == "printed once"


@pytest.mark.parametrize(
    ("name", "arguments"), [("on_process", {"process_index": 2}), ("on_local_process", {"local_process_index": 2})]
)
def test_decorators_for_another_process(name: str, arguments: dict[str, int]) -> None:
    """A function for another process does not run here."""
    decorated = getattr(Accelerator(), name)(**arguments)(lambda: pytest.fail("ran on the wrong process"))
    assert decorated() is None


def test_padding_on_one_process() -> None:
    """Tensors of one process have one size already."""
    accelerator = Accelerator()
    tensor = torch.arange(accelerator.process_index + 1).to(accelerator.device)
    assert accelerator.pad_across_processes(tensor).shape == (1,)


def test_prepare_keeps_the_order() -> None:
    """Objects come back in the order in which they were given, and train."""
    accelerator = Accelerator()
    given = _parts()
    model, optimizer, loader, schedule = accelerator.prepare(*given)
    assert [type(item).__name__ for item in (model, optimizer, schedule)] == [
        "Linear",
        "AcceleratedOptimizer",
        "AcceleratedScheduler",
    ]
    assert isinstance(loader, DataLoader)
    loss = _loss(model, next(iter(loader)))
    accelerator.backward(loss)
    optimizer.step()
    assert _loss(model, next(iter(loader))) < loss


def test_prepare_places_what_it_is_told_to() -> None:
    """The list for `device_placement` speaks of each object, and must have as many entries."""
    accelerator = Accelerator()
    prepared = accelerator.prepare(*_parts(), device_placement=[True, True, False, False])
    assert prepared[2].device is None
    assert next(prepared[0].parameters()).device == accelerator.device
    with pytest.raises(ValueError, match=r"device_placement"):
        accelerator.prepare(*_parts(), device_placement=[True])


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


def test_print_once(capsys: pytest.CaptureFixture[str]) -> None:
    """`print` prints, with the arguments of the builtin."""
    Accelerator().print("Hello", "world!", sep="-")
    assert capsys.readouterr().out == "Hello-world!\n"


def test_profile_of_a_block() -> None:
    """The profiler of the block knows what ran in it."""
    accelerator = Accelerator(cpu=True)
    with accelerator.profile() as profiler:
        nn.Linear(4, 4)(torch.ones(2, 4))
    assert "aten::linear" in profiler.key_averages().table()


@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")
def test_profile_on_a_schedule() -> None:
    """With a schedule, the handler is called with the profiler when its active step is over."""
    tables: list[str] = []

    def custom_handler(profiler: Any) -> None:
        tables.append(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=10))

    kwargs = ProfileKwargs(schedule_option={"wait": 1, "warmup": 1, "active": 1}, on_trace_ready=custom_handler)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    with accelerator.profile() as profiler:
        for _ in range(6):
            torch.ones(2, 2) @ torch.ones(2, 2)
            profiler.step()
    assert len(tables) == 2
    assert "aten::mm" in tables[0]


def test_profile_into_a_folder(tmp_path: Path) -> None:
    """With a folder, the trace of this process is a Chrome trace in it; a handler of the call comes first."""
    accelerator = Accelerator(cpu=True)
    with accelerator.profile(ProfileKwargs(output_trace_dir=str(tmp_path / "output_trace"))):
        torch.ones(2, 2) @ torch.ones(2, 2)
    (trace,) = (tmp_path / "output_trace").iterdir()
    assert "traceEvents" in json.loads(trace.read_text())


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_reduce_on_one_process(reduction: str) -> None:
    """The sum or mean over one process is its own tensor."""
    accelerator = Accelerator()
    tensor = torch.arange(accelerator.num_processes) + 1 + 2 * accelerator.process_index
    assert accelerator.reduce(tensor, reduction=reduction).tolist() == [1]


@pytest.mark.parametrize("safe_serialization", [False, True])
def test_save_any_object(tmp_path: Path, safe_serialization: bool) -> None:
    """`save` writes what torch writes, and weights as safetensors where that is asked for."""
    accelerator = Accelerator()
    if safe_serialization:
        accelerator.save({"weight": torch.ones(2)}, str(tmp_path / "file.safetensors"), safe_serialization=True)
        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(2))
        load_checkpoint_in_model(model, str(tmp_path / "file.safetensors"))
        assert model.weight.tolist() == [1, 1]
    else:
        accelerator.save([0, 1, 2, 3], str(tmp_path / "array.pkl"))
        assert torch.load(tmp_path / "array.pkl") == [0, 1, 2, 3]


@pytest.mark.parametrize("max_shard_size", ["10GB", "0.2KB", 200])
def test_save_model_can_be_loaded_again(tmp_path: Path, max_shard_size: str | int) -> None:
    """What `save_model` wrote, in one file or in shards, `load_checkpoint_in_model` reads."""
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)))
    accelerator.save_model(model, str(tmp_path), max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size != "10GB")
    again = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    load_checkpoint_in_model(again, str(tmp_path))
    assert torch.equal(_weights(again), _weights(model))


def test_save_model_without_safetensors(tmp_path: Path) -> None:
    """Without safe serialization the file is torch's."""
    model = nn.Linear(1, 1)
    Accelerator().save_model(model, str(tmp_path), safe_serialization=False)
    assert torch.equal(torch.load(tmp_path / "pytorch_model.bin")["weight"], model.weight)


@pytest.mark.parametrize("of", ["method", "function"])
def test_skip_first_batches(of: str) -> None:
    """The new loader begins after the batches that are skipped; the old one goes on as it was."""
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(8), batch_size=2))  # type: ignore[arg-type]
    skip = accelerator.skip_first_batches if of == "method" else skip_first_batches
    skipped = skip(loader, num_batches=2)
    assert [batch.tolist() for batch in skipped] == [[4, 5], [6, 7]]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_split_on_one_process() -> None:
    """One process gets everything, padded or not, and a dict of lists too."""
    accelerator = Accelerator()
    for padding in (False, True):
        with accelerator.split_between_processes(["A", "B", "C"], apply_padding=padding) as inputs:
            assert inputs == ["A", "B", "C"]
    with accelerator.split_between_processes({"a": [1, 2], "b": torch.tensor([3, 4])}) as inputs:
        assert inputs["a"] == [1, 2]
        assert inputs["b"].tolist() == [3, 4]


def test_unscaling_without_a_scaler_does_nothing() -> None:
    """Gradients stay as they are where nothing scaled them."""
    model, optimizer, loader, _ = _parts()
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.backward(_loss(model, next(iter(loader))))
    before = model.weight.grad.clone()
    accelerator.unscale_gradients(optimizer=optimizer)
    accelerator.unscale_gradients()
    assert torch.equal(model.weight.grad, before)


def test_unwrap_gives_the_model_back() -> None:
    """The model that was given comes back, in mixed precision with or without its forward."""
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    given = nn.Linear(2, 2)
    model = accelerator.prepare(given)
    assert accelerator.unwrap_model(model) is given
    assert model(torch.ones(1, 2)).dtype is torch.float32
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert bare.forward.__func__ is nn.Linear.forward


def test_unwrap_a_compiled_model() -> None:
    """The compiled form stays unless it is not to be kept."""
    accelerator = Accelerator(dynamo_backend="eager")
    given = nn.Linear(2, 2)
    model = accelerator.prepare(given)
    assert hasattr(accelerator.unwrap_model(model), "_orig_mod")
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is given


def test_verify_device_map(tmp_path: Path) -> None:
    """A model that a device map spreads is told from one that is whole."""
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    assert not accelerator.verify_device_map(model)
    spread = dispatch_model(model, {"0": "cpu", "1": "disk"}, main_device="cpu", offload_dir=tmp_path)
    assert accelerator.verify_device_map(spread)


def test_waiting_alone_returns() -> None:
    """One process waits for nobody."""
    Accelerator().wait_for_everyone()


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


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_of_a_plain_run(name: str) -> None:
    """Every attribute has the value of one process on a CPU."""
    assert getattr(Accelerator(cpu=True), name) == ATTRIBUTES[name]


def test_loader_configuration_reaches_the_loaders() -> None:
    """What is said of loaders is seen in the Accelerator and in what it prepares."""
    config = DataLoaderConfiguration(use_seedable_sampler=True, even_batches=False, non_blocking=True)
    accelerator = Accelerator(dataloader_config=config)
    assert (accelerator.use_seedable_sampler, accelerator.even_batches, accelerator.non_blocking) == (True, False, True)
    loader = accelerator.prepare(DataLoader(range(6), batch_size=2, shuffle=True))  # type: ignore[arg-type]

    def epoch(number: int) -> list[int]:
        set_seed(1)
        loader.set_epoch(number)
        return [int(item) for batch in loader for item in batch]

    assert epoch(0) == epoch(0)
    assert sorted(epoch(1)) == list(range(6))
