"""The facade, on one process."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_core.accelerator import Accelerator
from accel_core.errors import (
    ConfigurationError,
    MissingDependencyError,
    PreparationError,
    StateError,
    UnsupportedTypeError,
)
from accel_core.host.environ import patch_environment
from accel_core.optim.scheduler import AcceleratedScheduler
from accel_core.options.engines import Engine, Presence
from accel_core.options.enums import DistributedType
from accel_core.plugins.accumulation import GradientAccumulationPlugin
from accel_core.plugins.compilation import TorchDynamoPlugin
from accel_core.plugins.handlers import AutocastKwargs, GradScalerKwargs, ProfileKwargs
from accel_core.plugins.loading import DataLoaderConfiguration
from accel_core.plugins.project import ProjectConfiguration
from accel_core.state import AcceleratorState, PartialState
from accel_core.strategies.strategy import strategy_of

pytestmark = pytest.mark.usefixtures("fresh_state")


def _objects() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(12, 4), torch.randint(2, (12,))), batch_size=4)
    return model, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.fixture
def accelerator(fresh_state: None) -> Accelerator:
    """Give an Accelerator of one process without settings."""
    return Accelerator()


def _train(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> list[torch.Tensor]:
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return losses


def test_prepare_gives_back_each_kind_in_order(accelerator: Accelerator) -> None:
    """Objects come back in the order given, wrapped by kind; what is unknown passes through."""
    model, optimizer, loader, schedule = _objects()
    other = object()
    result = accelerator.prepare(schedule, other, loader, optimizer, model)
    assert [type(item).__name__ for item in result] == [
        "AcceleratedScheduler",
        "object",
        "DataLoaderShard",
        "AcceleratedOptimizer",
        "Sequential",
    ]
    assert result[1] is other
    assert result[4] is model
    assert result[0].optimizers == [result[3]]
    assert isinstance(result[2], DataLoader)
    assert accelerator.prepare(other) is other
    assert accelerator.prepare(model) is model


def test_preparing_again_changes_nothing() -> None:
    """The same objects, raw or prepared, give the same prepared ones, and are registered once."""
    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer, loader, schedule = _objects()
    first = accelerator.prepare(model, optimizer, loader, schedule)
    forward = model.forward
    assert accelerator.prepare(*first) == first
    assert accelerator.prepare(model, optimizer, schedule) == (first[0], first[1], first[3])
    assert model.forward == forward
    assert [len(kept) for kept in (accelerator._models, accelerator._optimizers, accelerator._schedulers)] == [1, 1, 1]


@pytest.mark.parametrize("order", ["together", "model first", "optimizer first"])
def test_optimizer_follows_parameters_that_moving_replaced(accelerator: Accelerator, order: str) -> None:
    """Where moving a model replaces its parameters, its optimizer trains the new ones, in any order of prepares."""
    model = nn.Linear(2, 2)
    old = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        if order == "together":
            model, optimizer = accelerator.prepare(model, optimizer)
        elif order == "model first":
            model, optimizer = accelerator.prepare(model), accelerator.prepare(optimizer)
        else:
            optimizer, model = accelerator.prepare(optimizer), accelerator.prepare(model)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
    assert all(new is not old[name] for name, new in model.named_parameters()), "torch replaced them"
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [id(parameter) for parameter in held] == [id(parameter) for parameter in model.parameters()]
    weight = model.weight.detach().clone()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert not torch.equal(model.weight, weight)


def test_compiled_model_is_prepared_like_any_other() -> None:
    """A model that was compiled before prepare computes in bf16, is moved, and stays compiled as it was."""
    seen: list[torch.dtype] = []

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            seen.append(out.dtype)
            return out

    backends: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        backends.append(graph)
        return graph.forward

    accelerator = Accelerator(mixed_precision="bf16")
    plain = Layer(2, 2)
    compiled = torch.compile(plain, backend=backend)
    model = accelerator.prepare(compiled)
    assert model(torch.ones(1, 2)).dtype is torch.float32
    assert seen[-1] is torch.bfloat16
    assert backends, "the user's backend compiles it still"
    assert accelerator.prepare(model) is model
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is plain


def test_weights_without_a_model_or_optimizer_are_refused(accelerator: Accelerator) -> None:
    """Where gradients cannot be found no step has the wrong length; a prepared optimizer is enough to find them."""
    accelerator.prepare(nn.Linear(2, 1))
    model = nn.Linear(2, 1)
    with pytest.raises(StateError, match=r"no gradients to apply.*got 1 models\. Prepare the model"):
        accelerator.backward(model(torch.ones(3, 2)).sum(), weight=3)
    model.zero_grad()
    accelerator = Accelerator()
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.ones(4, 2)).sum(), weight=4)
    torch.testing.assert_close(model.weight.grad, torch.ones(1, 2))


def test_what_cannot_be_prepared_is_refused_and_changes_nothing(accelerator: Accelerator) -> None:
    """Placements of wrong length, a device map with disk parts, an object without state, LOMO without its optimizer."""
    offloaded = nn.Linear(1, 1)
    offloaded.hf_device_map = {"": "disk"}
    with pytest.raises(PreparationError, match="got 1 for 2 objects"):
        accelerator.prepare(nn.Linear(1, 1), object(), device_placement=[True])
    with pytest.raises(PreparationError, match="disk"):
        accelerator.prepare(offloaded)
    with pytest.raises(ConfigurationError, match=r"object \(number 1\)"):
        accelerator.register_for_checkpointing(torch.amp.GradScaler("cpu"), object())
    assert accelerator._models == accelerator._custom_objects == []
    model, _ = accelerator.prepare(*_objects()[:2])
    with pytest.raises(PreparationError, match="got 1 prepared optimizers"):
        accelerator.lomo_backward(model(torch.ones(1, 4)).sum(), 0.1)


def test_training_equals_plain_pytorch_bit_for_bit() -> None:
    """One process, no mixed precision: the same arithmetic, the same weights."""
    model, optimizer, loader, schedule = _objects()
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator = Accelerator()
    ours, optimizer, loader, schedule = accelerator.prepare(*_objects())
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(ours(x), y))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_mixed_precision_computes_in_halves_and_returns_fp32(precision: str) -> None:
    """Inside forward values are halves, outputs are fp32, and the model still learns."""
    accelerator = Accelerator(mixed_precision=precision)
    model, optimizer, loader, _ = _objects()
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    before = model[0].weight.detach().clone()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = _train(accelerator, model, optimizer, loader)
    assert set(seen) == {torch.float16 if precision == "fp16" else torch.bfloat16}
    assert {loss.dtype for loss in losses} == {torch.float32}
    assert (accelerator.scaler is not None) == (precision == "fp16")
    assert accelerator.native_amp
    assert not torch.equal(before, model[0].weight)


def test_nan_loss_under_fp16_skips_and_reports() -> None:
    """A NaN loss moves neither weights nor schedule, and the skipped step is reported."""
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    model, optimizer, _, schedule = accelerator.prepare(*_objects())
    before, rate = model[0].weight.detach().clone(), schedule.get_last_lr()
    accelerator.backward(model(torch.ones(2, 4)).sum() * float("nan"))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    assert accelerator.optimizer_step_was_skipped
    assert torch.equal(before, model[0].weight)
    assert schedule.get_last_lr() == rate
    assert accelerator.scaler.get_scale() == 4.0


def test_clipping_unscales_once_for_any_number_of_calls() -> None:
    """Under fp16, clipping twice (two groups of parameters) divides the gradients by the scale once."""
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    model, _ = accelerator.prepare(*_objects()[:2])
    accelerator.backward(model(torch.ones(2, 4)).sum())
    plain = [p.grad / 1024.0 for p in model.parameters()]
    accelerator.clip_grad_norm_(model[0].parameters(), 1e9)
    accelerator.clip_grad_norm_(model[2].parameters(), 1e9)
    for ours, expected in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(ours.grad, expected)


def test_clipping_in_an_open_window_counts_no_scale() -> None:
    """Under fp16, gradients of a window that goes on are clipped as those of fp32 are, although they stay scaled."""
    found = []
    for precision in ("no", "fp16"):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        norms = []
        for batch in torch.linspace(0, 1, 16).view(2, 2, 4):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
                accelerator.clip_grad_value_(model.parameters(), 0.4)
        found.append((*norms, model.weight.grad))
    for mixed, full in zip(*found, strict=True):
        torch.testing.assert_close(mixed, full, rtol=1e-2, atol=1e-3)


def test_a_second_loss_with_a_weight_is_refused_before_a_step() -> None:
    """Its gradients would be added to those of a complete mean; behind a step, or cleared gradients, it is another."""
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for end in (optimizer.step, optimizer.zero_grad, model.zero_grad):
        model.zero_grad()
        accelerator.backward(model(torch.ones(3, 2)).sum(), weight=3)
        before = model.weight.grad.clone()
        with pytest.raises(StateError, match=r"another such loss before optimizer\.step\(\)"):
            accelerator.backward(model(torch.ones(5, 2)).sum(), weight=5)
        torch.testing.assert_close(model.weight.grad, before)
        end()
        accelerator.backward(model(torch.ones(5, 2)).sum(), weight=5)
        optimizer.step()


def test_two_models_do_not_share_a_window_of_weights() -> None:
    """In a window of several batches the weights of both would add up, and the loss of the second is refused."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    made = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    *models, one, other = accelerator.prepare(*models, *made)
    for last in (False, True):
        with accelerator.accumulate(*models):
            accelerator.backward(models[0](torch.ones(3, 2)).sum(), weight=3)
            one.step()
            with pytest.raises(StateError, match="in a window of several") if last else nullcontext():
                accelerator.backward(models[1](torch.ones(3, 2)).sum(), weight=3)
            other.step()


def test_weights_that_changed_are_cast_anew_in_an_autocast_block() -> None:
    """A loop inside of one autocast block computes with the weights that it has trained."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    batch = torch.ones(2, 4)
    with accelerator.autocast():
        before = model(batch)
        accelerator.backward(before.mean())
        optimizer.step()
        inside = model(batch)
    assert not torch.equal(inside, before)
    torch.testing.assert_close(inside, model(batch), rtol=0, atol=0)


def test_weighted_and_plain_losses_do_not_mix_in_one_window() -> None:
    """A window with weights needs them for all of its batches."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(2, 1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(3, 2)).sum(), weight=3)
    with accelerator.accumulate(model), pytest.raises(ConfigurationError, match=r"weight=\.\.\."):
        accelerator.backward(model(torch.ones(3, 2)).sum())


# torch.compile of torch 2.15 looks at it itself, for an input that is computed
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("regional", [False, True])
def test_compiled_model_trains_and_unwraps(regional: bool) -> None:
    """Whole and regional compilation give the same results, and unwrapping gives the plain model back."""
    blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x).relu()
            return x

    plain = Stack()
    x = torch.randn(2, 4)
    expected = plain(x)
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
    accelerator = Accelerator(dynamo_plugin=plugin)
    model = accelerator.prepare(plain)
    assert model is not plain
    torch.testing.assert_close(model(x), expected)
    model(x).sum().backward()
    assert all(p.grad is not None for p in plain.parameters())
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is plain
    assert accelerator.get_state_dict(model).keys() == plain.state_dict().keys()


def test_unwrapping_can_restore_the_plain_forward() -> None:
    """Without the fp32 wrapper the model computes as it was written."""
    accelerator = Accelerator(mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(2, 2))
    assert accelerator.unwrap_model(model) is model
    assert "forward" in model.__dict__
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert plain is model
    assert "forward" not in model.__dict__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixed_precision": "fp32"}, "'fp32'.*bf16"),
        ({"gradient_accumulation_steps": 0}, "got num_steps=0"),
        (
            {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3)},
            "given twice",
        ),
        ({"split_batches": True, "dataloader_config": DataLoaderConfiguration()}, "given twice"),
        ({"dynamo_backend": "eager", "dynamo_plugin": TorchDynamoPlugin()}, "given twice"),
        ({"kwargs_handlers": ["ddp"]}, r"got 'ddp' \(str\)"),
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, "two AutocastKwargs"),
    ],
)
def test_contradictions_leave_no_state(arguments: dict[str, Any], message: str) -> None:
    """What is not valid is refused by name before any state exists."""
    with pytest.raises((ConfigurationError, UnsupportedTypeError), match=message):
        Accelerator(**arguments)
    assert AcceleratorState._shared_state == {}
    assert PartialState._shared_state == {}


def test_engine_of_the_environment_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """ACCELERATE_USE_DEEPSPEED without its library says what to install, and leaves no state."""
    absent = Presence(None, "deepspeed is not installed", "pip install deepspeed")
    monkeypatch.setattr(Engine, "presence", lambda engine: absent)
    with patch_environment(ACCELERATE_USE_DEEPSPEED="true"), pytest.raises(MissingDependencyError, match="deepspeed"):
        Accelerator()
    assert PartialState._shared_state == {}


def test_environment_counts_where_no_argument_is_given(caplog: pytest.LogCaptureFixture) -> None:
    """Variables of a launcher set precision, accumulation and compilation; one that an argument hides is told."""
    with patch_environment(
        ACCELERATE_MIXED_PRECISION="bf16", ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4, ACCELERATE_USE_CPU=1
    ):
        accelerator = Accelerator()
        assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 4)
        assert caplog.text == ""
        assert Accelerator(gradient_accumulation_steps=3).gradient_accumulation_steps == 3
    assert accelerator.state._cpu is True
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 is not used" in caplog.text


def test_public_attributes_are_there(accelerator: Accelerator) -> None:
    """Attributes that scripts read on an Accelerator, with their values on one process."""
    assert accelerator.distributed_type is DistributedType.NO
    assert (accelerator.step, accelerator.trackers, accelerator.scaler, accelerator.rng_types) == (
        0,
        [],
        None,
        ["generator"],
    )
    assert accelerator.flag_tensor is None
    accelerator.set_trigger()
    assert (accelerator.check_trigger(), accelerator.check_trigger()) == (True, False), "the flag is seen once"
    assert accelerator.ddp_handler is None
    assert accelerator.should_save_model
    assert not accelerator.multi_device
    assert accelerator.parallelism_config is None
    with pytest.raises(StateError, match="parallelism_config"):
        _ = accelerator.tensor_parallel_rank


def test_profile_writes_a_chrome_trace(accelerator: Accelerator, tmp_path: Path) -> None:
    """With an output folder each rank writes its trace."""
    with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))) as profiler:
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert any("mm" in event.key for event in profiler.key_averages())
    assert json.loads((tmp_path / "profile_0.json").read_text())["traceEvents"]


@pytest.mark.parametrize("name", ["clear", "free_memory"])
def test_released_memory_lets_everything_go(name: str) -> None:
    """After it nothing is registered or held, the step counter is at its start, and a None comes back for each."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader, schedule = accelerator.prepare(*_objects())
    _train(accelerator, model, optimizer, [next(iter(loader))])
    assert accelerator.step == 1
    held = weakref.ref(model)
    model, optimizer, loader, schedule = getattr(accelerator, name)(model, optimizer, loader, schedule)
    gc.collect()
    assert model is optimizer is loader is schedule is held() is None
    assert accelerator._models == accelerator._optimizers == accelerator._dataloaders == accelerator._schedulers == []
    assert accelerator.step == 0


def test_living_accelerator_survives_a_reset(accelerator: Accelerator) -> None:
    """Consumers reset the state between runs; an Accelerator that lives keeps working."""
    AcceleratorState._reset_state(reset_partial_state=True)
    assert accelerator.num_processes == 1
    assert accelerator.device.type == "cpu"
    model, optimizer, loader, _ = accelerator.prepare(*_objects())
    assert len(_train(accelerator, model, optimizer, loader)) == 3


def test_settings_changed_on_a_living_accelerator_take_effect() -> None:
    """What is set between two prepares counts from the next one on, and what is read comes back."""
    accelerator = Accelerator(mixed_precision="bf16")
    x = torch.ones(1, 4)
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert (x @ x.T).dtype is torch.float32
    accelerator.autocast_handler = AutocastKwargs(enabled=False)
    assert accelerator.autocast_handler.enabled is False
    with accelerator.autocast():
        assert (x @ x.T).dtype is torch.float32
    accelerator.autocast_handler = None
    with accelerator.autocast():
        assert (x @ x.T).dtype is torch.bfloat16
    accelerator.native_amp = False
    with accelerator.autocast():
        assert (x @ x.T).dtype is torch.float32
    assert "forward" not in accelerator.prepare(nn.Linear(4, 4)).__dict__
    accelerator.native_amp = True
    assert "forward" in accelerator.prepare(nn.Linear(4, 4)).__dict__

    accelerator.dataloader_config = DataLoaderConfiguration(split_batches=True, dispatch_batches=True)
    accelerator.step_scheduler_with_optimizer = False
    accelerator.device_placement = False
    _, optimizer, loader, schedule = accelerator.prepare(*_objects())
    assert accelerator.split_batches
    assert (schedule.split_batches, schedule.step_with_optimizer) == (True, False)
    assert optimizer.device_placement is False
    assert loader.device is None
    project = ProjectConfiguration("elsewhere")
    accelerator.project_configuration = project
    assert accelerator.project_dir == "elsewhere"


class Overriding(Accelerator):
    """Notes which of its verbs are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []


def _noting(verb: str) -> Any:
    def method(self: Overriding, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(verb)
        return getattr(Accelerator, verb)(self, *args, **kwargs)

    return method


for _verb in ("prepare_model", "prepare_optimizer", "prepare_data_loader", "prepare_scheduler", "gather"):
    setattr(Overriding, _verb, _noting(_verb))


def test_what_a_subclass_overrides_is_called() -> None:
    """Each verb once for its object, models first and schedules last, and gathering for metrics gathers."""
    accelerator = Overriding()
    model, optimizer, loader, schedule = _objects()
    accelerator.prepare(schedule, loader, optimizer, model)
    assert accelerator.calls == ["prepare_model", "prepare_optimizer", "prepare_data_loader", "prepare_scheduler"]
    accelerator.gather_for_metrics(torch.ones(2))
    assert accelerator.calls[4:] == ["gather"]


def test_a_subclass_may_unwrap_any_object_or_another_module(tmp_path: Path) -> None:
    """`_prepare_one` sees what is of no known kind, and what `unwrap_model` returns is what is saved."""

    class Taking(Accelerator):
        def _prepare_one(self, obj: Any, first_pass: bool = False, device_placement: bool | None = None) -> Any:
            if isinstance(obj, str) and first_pass:
                return obj.upper()
            return super()._prepare_one(obj, first_pass, device_placement)

        def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            return super().unwrap_model(model, *args, **kwargs)[0]

    accelerator = Taking()
    model, text = accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "text")
    assert text == "TEXT"
    assert accelerator.get_state_dict(model).keys() == model[0].state_dict().keys()
    assert accelerator.get_state_dict(model, unwrap=False).keys() == model.state_dict().keys()
    accelerator.save_model(model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == model[0].state_dict().keys()


def test_a_pickled_accelerator_goes_on_training() -> None:
    """Pickled with what it prepared, between two windows, it trains to the same weights bit by bit, and scales."""
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    accelerator.step_scheduler_with_optimizer = False
    model, optimizer, loader, _ = _objects()
    optimizer, loader = accelerator.prepare(optimizer, loader)
    batches = list(loader)[:2]
    _train(accelerator, model, optimizer, batches)
    accelerator.note = "own"  # type: ignore[attr-defined]
    objects = pickle.loads(pickle.dumps((accelerator, model, optimizer)))
    weights = []
    for each in ((accelerator, model, optimizer), objects):
        _train(*each, batches)
        weights.append(each[1].state_dict())
    again = objects[0]
    assert (again.mixed_precision, again.gradient_accumulation_steps, again.step) == ("bf16", 2, accelerator.step)
    assert (again.step_scheduler_with_optimizer, again.note) == (False, "own")
    assert again._optimizers == [objects[2]]
    assert again.state.__dict__ is AcceleratorState._shared_state
    assert again.scaler is again._optimizers[0].scaler
    assert again.scaler.get_scale() == accelerator.scaler.get_scale() == 4.0
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=0, atol=0)
    accelerator.prepare(model)
    again = pickle.loads(pickle.dumps(accelerator))
    assert strategy_of(again._models[0]) is again._runtime.strategy
    assert pickle.loads(pickle.dumps(optimizer)).gradient_state.__dict__ is accelerator.gradient_state.__dict__


def test_copies_of_an_accelerator(accelerator: Accelerator) -> None:
    """A deep copy is the Accelerator itself; a shallow one has its parts and attributes of its own."""
    accelerator.prepare(nn.Linear(1, 1))
    assert copy.deepcopy(accelerator) is accelerator
    other = copy.copy(accelerator)
    other.note = "other"  # type: ignore[attr-defined]
    assert other._models is accelerator._models
    assert not hasattr(accelerator, "note")


def test_schedules_and_optimizers_are_pickled_mid_epoch(accelerator: Accelerator) -> None:
    """What was prepared can be pickled while a loader is read; the copies go on."""
    _, optimizer, loader, schedule = accelerator.prepare(*_objects())
    for _ in loader:
        optimizer.step()
        schedule.step()
        copied, moved = pickle.loads(pickle.dumps((optimizer, schedule)))
        assert moved.optimizers[0] is copied
        copied.step()
        moved.step()
        assert moved.get_last_lr() != schedule.get_last_lr()
        assert copied.param_groups[0]["lr"] == moved.get_last_lr()[0]
        break


def test_schedule_without_its_optimizer_gets_all(accelerator: Accelerator) -> None:
    """A schedule whose optimizer was not prepared waits for all that were."""
    _, optimizer, _, _ = _objects()
    foreign = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), 1)
    prepared, wrapped = accelerator.prepare(optimizer, foreign)
    assert isinstance(wrapped, AcceleratedScheduler)
    assert wrapped.optimizers == [prepared]


@pytest.mark.slow
def test_lomo_updates_inside_backward() -> None:
    """A LOMO optimizer needs a rate at backward, learns there, and its own step has nothing left to do."""
    library = pytest.importorskip("lomo_optim", reason="needs the library lomo_optim, not installed here")
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, library.Lomo(model, lr=0.1))
    x = torch.randn(8, 4)
    losses = []
    for _ in range(5):
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        accelerator.backward(loss, learning_rate=0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert accelerator.has_lomo_optimizer
    assert losses == sorted(losses, reverse=True)
    with pytest.raises(PreparationError, match="learning_rate"):
        accelerator.lomo_backward(loss, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"LOMO.*got a weight"):
        accelerator.backward(model(x).sum(), weight=8, learning_rate=0.05)


@pytest.mark.slow
def test_fp8_trains_on_the_cpu() -> None:
    """mixed_precision='fp8' converts inner layers through torchao, and the model learns."""
    pytest.importorskip("torchao", reason="needs the library torchao, not installed here")
    accelerator = Accelerator(mixed_precision="fp8")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    assert type(model[2]).__name__ == "Float8Linear"
    assert (accelerator.fp8_backend.value, accelerator.fp8_enabled) == ("AO", True)
    x = torch.randn(32, 16)
    losses = []
    for _ in range(60):
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
