"""Tensor parallel: the conformance suite alone and beside copies, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from several_ranks import LAYERS, WHOLE, fsdp, split
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from accel_core.accelerator import Accelerator
from accel_core.checkpoint.weights import load_model
from accel_core.errors import ConfigurationError, PreparationError, StateError
from accel_core.plugins.handlers import GradScalerKwargs
from accel_core.plugins.parallelism import ParallelismConfig, TorchTensorParallelPlugin
from accel_core.process.world import ensure
from accel_core.state import reset_all
from accel_parallel.fsdp2.strategy import FullyShardStrategy
from accel_parallel.mesh.strategy import MeshStrategy
from accel_testing import requires, world
from accel_testing.conformance.strategy import Refusal, StrategyConformance


class Split(StrategyConformance):
    """The two layers of the model are split over two ranks."""

    strategy = MeshStrategy
    plan: ClassVar[dict[str, Any]] = {"0": "colwise", "2": "rowwise"}

    def arguments(self) -> dict[str, Any]:
        """Return the axes and the plan."""
        return {"parallelism_config": split(self.plan, dp_replicate_size=ensure().size // 2)}

    def refusals(self) -> Sequence[Refusal]:
        """Return what cannot be split, and steps that nobody averaged."""

        def named(pattern: str, style: Any = "colwise") -> Any:
            def act(accelerator: Accelerator) -> None:
                accelerator._runtime.strategy.tensor._plan = {pattern: style}
                net = self._model()
                before = dict(net.named_parameters())
                try:
                    accelerator.prepare(net)
                finally:
                    assert all(before[name] is parameter for name, parameter in net.named_parameters())

            return act

        return [
            Refusal(
                named("layers.*.up"), PreparationError, r"'layers\.\*\.up', which matches none of Sequential\. The"
            ),
            Refusal(named("1"), PreparationError, "got 1, a Tanh"),
            Refusal(named("2"), PreparationError, "out_features=1 of 2 and 2 ranks"),
            Refusal(named("0", "diagonal"), PreparationError, "got 'diagonal' for '0'"),
        ]


class Sharded(Split):
    """What each rank holds of the two layers is sharded over two more."""

    strategy = FullyShardStrategy

    def arguments(self) -> dict[str, Any]:
        """Return the axes, the plan and a plugin that shards each layer."""
        return {"parallelism_config": split(self.plan, dp_shard_size=2), "fsdp_plugin": fsdp(**WHOLE, **LAYERS)}


@pytest.mark.parametrize("ranks", [2, 4])
@world("ranks")
def test_a_split_model_equals_one_process(tmp_path: Path, ranks: int) -> None:
    """A model that is split over ranks, alone and beside its copy, passes the whole suite."""
    Split()._everything(tmp_path)


@world(4)
def test_shards_of_a_split_model_equal_one_process(tmp_path: Path) -> None:
    """A model that is split over two ranks, and sharded over two more, passes the whole suite."""
    Sharded()._everything(tmp_path)


class Norms(nn.Module):
    """Two blocks with norms that no plan of columns and rows names, and an embedding tied to the head."""

    tp_plan: ClassVar[dict[str, Any]] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    """A norm and two layers beside the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the block to the stream."""
        return x + self.down(self.up(self.norm(x)).relu())


SEQUENCES: dict[str, Any] = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.norm": SequenceParallel(),
    "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
"""Norms see a part of each sequence: torch leaves the gradients of their weights as summands on the ranks."""


def tokens(rows: int = 4) -> torch.Tensor:
    """Return sequences of four tokens."""
    return torch.arange(rows * 4).mul(5).remainder(8).view(rows, 4)


def seeded() -> Any:
    """Return the same model everywhere."""
    torch.manual_seed(3)
    return Norms().double()


def step(net: nn.Module, optimizer: Any, backward: Any, clip: Any, x: torch.Tensor) -> float:
    """Take one step that is clipped, and return the norm."""
    loss = nn.functional.cross_entropy(net(x).flatten(0, 1), x.roll(1, 1).flatten())
    backward(loss)
    norm = clip(net.parameters(), 0.3)
    assert type(norm) is torch.Tensor, "a plain scalar"
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def plainly(steps: int = 3) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train in one process; return the weights and the norms."""
    net = seeded()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    norms = [step(net, optimizer, torch.Tensor.backward, nn.utils.clip_grad_norm_, tokens()) for _ in range(steps)]
    return dict(net.state_dict()), norms


@world(2)
def test_norms_and_ties_train_as_in_one_process() -> None:
    """Norms that stay whole, norms on parts of sequences, and a tied head: weights and norms of gradients are right."""
    expected, norms = plainly()
    for plan in ("auto", SEQUENCES):
        reset_all()
        accelerator = Accelerator(cpu=True, parallelism_config=split(plan))
        net = seeded()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        optimizer, net = accelerator.prepare(optimizer, net)
        assert net.head.weight is net.embed.weight
        assert net.head.weight.to_local().shape == (4, 4)
        found = [step(net, optimizer, accelerator.backward, accelerator.clip_grad_norm_, tokens()) for _ in range(3)]
        torch.testing.assert_close(found, norms)
        torch.testing.assert_close(dict(accelerator.get_state_dict(net)), expected)
        whole = [parameter for parameter in net.parameters() if not isinstance(parameter, DTensor)]
        assert bool(whole) == (plan == "auto")


@pytest.mark.full("compiled once more")
@world(2)
def test_split_models_are_compiled_and_compute_in_bf16() -> None:
    """A compiled model has the losses of one process; one in bf16 has them to its precision, with weights in fp32."""
    torch.manual_seed(3)
    expected = float(loss_of(Norms()))
    for given, tolerance in (({"dynamo_backend": "eager"}, 1e-6), ({"mixed_precision": "bf16"}, 2e-2)):
        reset_all()
        accelerator = Accelerator(cpu=True, parallelism_config=split("auto"), **given)
        torch.manual_seed(3)
        net = Norms()
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        loss = loss_of(net)
        assert float(loss) == pytest.approx(expected, rel=tolerance)
        accelerator.backward(loss)
        optimizer.step()
        assert float(loss_of(net)) < expected
        assert all(parameter.dtype is torch.float32 for parameter in net.parameters())


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=requires("torch:2.8"))])
@world("ranks")
def test_ranks_that_split_a_model_skip_a_step_together(ranks: int) -> None:
    """In fp16 a split model, sharded or not, learns as in 32 bits; an overflow on one rank makes all skip a step.

    Of four steps, the first has a scale that is too large, the third an overflow on one rank.
    """
    copies = ranks // 2
    given: dict[str, Any] = {"parallelism_config": split("auto", dp_shard_size=copies)}
    if copies > 1:
        given["fsdp_plugin"] = fsdp()
    torch.manual_seed(3)
    expected = float(loss_of(Norms()).detach())
    first = GradScalerKwargs(init_scale=2.0**60)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[first], **given)
    torch.manual_seed(3)
    net = Norms()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    skipped = []
    for _ in range(4):
        if skipped:
            accelerator.scaler.update(64.0)
        before = [parameter.detach().clone() for parameter in net.parameters()]
        loss = loss_of(net)
        accelerator.backward(loss)
        if len(skipped) == 2 and accelerator.process_index == 1:
            net.blocks[0].up.weight.grad.to_local()[0, 0] = torch.inf
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
        same = all(torch.equal(one, other) for one, other in zip(before, net.parameters(), strict=True))
        assert same == skipped[-1]
        scales = accelerator.gather(torch.tensor(accelerator.scaler.get_scale())).tolist()
        assert len(set(scales)) == 1
    assert skipped == [True, False, True, False]
    assert accelerator._runtime.strategy.tensor._unproved[net] is False  # type: ignore[attr-defined]
    assert float(loss) == pytest.approx(expected, rel=0.3)
    assert float(loss_of(net)) < expected


def loss_of(net: nn.Module) -> torch.Tensor:
    """Return how badly a model foretells the next token."""
    return nn.functional.cross_entropy(net(tokens()).flatten(0, 1).float(), tokens().roll(1, 1).flatten())


class Forgetful(ParallelStyle):
    """Splits a layer by columns, and forgets to add up the gradients of its input."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters()):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, device_mesh, [Shard(0)])))
        module.forward = lambda x: nn.functional.linear(x, module.weight.to_local(), module.bias.to_local())
        return module


@world(2)
def test_what_would_let_ranks_drift_apart_is_named() -> None:
    """A reduction that a plan lacks, and other data on some ranks, are errors before the first step, on every rank."""
    plan = {"blocks.*.up": Forgetful(), "blocks.*.down": "rowwise"}
    net, accelerator = seeded(), Accelerator(cpu=True, parallelism_config=split(plan))
    net = accelerator.prepare(net)
    with pytest.raises(StateError, match=r"got different ones of .*blocks\.0\.norm\.weight"):
        accelerator.backward(net(tokens()).square().mean())
    reset_all()
    net, accelerator = seeded(), Accelerator(cpu=True, parallelism_config=split("auto"))
    net = accelerator.prepare(net)
    own = tokens() if accelerator.is_main_process else tokens() + 1 - 1 * (tokens() > 6)
    with pytest.raises(StateError, match="got different ones of the loss"):
        accelerator.backward(nn.functional.cross_entropy(net(own).flatten(0, 1), own.roll(1, 1).flatten()))


@world(2)
def test_models_that_arrive_split_are_taken_over() -> None:
    """A model that the user split trains; one split over other ranks, or to be split by a second plan, is refused."""
    expected, norms = plainly()
    plan = {name: style for name, style in Norms.tp_plan.items() if name.startswith("blocks")}

    def arrived(ranks: list[int]) -> Any:
        return parallelize_module(seeded(), DeviceMesh("cpu", ranks), plan)

    accelerator = Accelerator(cpu=True, parallelism_config=split("auto"))
    with pytest.raises(PreparationError, match=r"here \[0, 1\]; got blocks\.0\.up\.weight .* the ranks \[1, 0\]"):
        accelerator.prepare(arrived([1, 0]))
    packed = nn.Linear(4, 8)
    packed.weight = nn.Parameter(
        distribute_tensor(packed.weight.detach(), DeviceMesh("cpu", [0, 1]), [_StridedShard(0, split_factor=2)])
    )
    with pytest.raises(PreparationError, match=r"got weight with .*, as packed projections are split"):
        accelerator.prepare(packed)
    net = arrived([0, 1])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    net, optimizer = accelerator.prepare(net, optimizer)
    found = [step(net, optimizer, accelerator.backward, accelerator.clip_grad_norm_, tokens()) for _ in range(3)]
    torch.testing.assert_close(found, norms)
    torch.testing.assert_close(dict(accelerator.get_state_dict(net)), expected)
    reset_all()
    accelerator = Accelerator(cpu=True, parallelism_config=split(plan))
    with pytest.raises(PreparationError, match="which arrived split, and a tp_plan"):
        accelerator.prepare(arrived([0, 1]))


@world(2)
def test_a_plugin_lays_out_the_axes() -> None:
    """The size of the plugin becomes an axis of the mesh, and has to be the size of the axes that are given."""
    accelerator = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
    assert accelerator.parallelism_config is not None
    assert accelerator.parallelism_config.tp_size == 2
    assert accelerator.torch_device_mesh.mesh_dim_names == ("tp",)
    assert accelerator.state.torch_tp_plugin.tp_size == 2
    reset_all()
    for size, sizes in ((3, None), (2, ParallelismConfig(dp_replicate_size=2))):
        with pytest.raises(ConfigurationError, match=f"got tp_size={size}, .* 2 processes"):
            Accelerator(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=size), parallelism_config=sizes)


@pytest.mark.usefixtures("fresh_state")
def test_a_run_with_dropout_goes_on_split(tmp_path: Path) -> None:
    """Of what one process saved, both ranks take the random states: they drop what it drops next."""
    accelerator, net, optimizer = _dropping()
    net(torch.ones(2, 4))
    accelerator.save_state(tmp_path / "whole")
    _one_more(accelerator, net, optimizer)
    torch.save(net.state_dict(), tmp_path / "expected")
    _with_dropout(tmp_path)


def _dropping(**given: Any) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    net: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.5))
    accelerator = Accelerator(cpu=True, **given)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return accelerator, net, optimizer


def _one_more(accelerator: Accelerator, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    accelerator.backward(net(torch.ones(2, 4)).square().mean())
    optimizer.step()


@world(2)
def _with_dropout(folder: Path) -> None:
    accelerator, net, optimizer = _dropping(parallelism_config=split({"0": "colwise", "2": "rowwise"}))
    accelerator.load_state(folder / "whole")
    _one_more(accelerator, net, optimizer)
    expected = torch.load(folder / "expected", weights_only=True)
    torch.testing.assert_close(dict(accelerator.get_state_dict(net)), dict(expected))


@pytest.mark.usefixtures("fresh_state")
def test_a_run_goes_on_with_another_mesh(tmp_path: Path) -> None:
    """Split, whole, sharded, split and sharded, split again: weights are those of a run that was never stopped."""
    expected, _ = plainly(10)
    world(2)(_goes_on)(tmp_path, "none", "split", "tp")
    assert {"pytorch_model_fsdp_0", "optimizer_0"} <= {path.name for path in (tmp_path / "split").iterdir()}
    _goes_on(tmp_path, "split", "whole", "")
    world(2)(_goes_on)(tmp_path, "whole", "sharded", "fsdp")
    world(4)(_goes_on)(tmp_path, "sharded", "both", "fsdp and tp")
    world(2)(_goes_on)(tmp_path, "both", "last", "tp")
    reset_all()
    accelerator = Accelerator(cpu=True)
    net = accelerator.prepare(seeded())
    load_model(net, tmp_path / "last" / "exported")
    torch.testing.assert_close(dict(net.state_dict()), expected)


def _goes_on(folder: Path, before: str, after: str, how: str) -> None:
    """Load a checkpoint, take two steps with other weights in place until then, and save."""
    given: dict[str, Any] = {}
    if "tp" in how:
        given["parallelism_config"] = split("auto", dp_shard_size=2 if "fsdp" in how else 1)
    if "fsdp" in how:
        given["fsdp_plugin"] = fsdp()
    accelerator = Accelerator(cpu=True, **given)
    torch.manual_seed(3 if before == "none" else 4)
    net: Any = Norms().double()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    if before != "none":
        accelerator.load_state(str(folder / before))
    layout = accelerator._runtime.layout
    rows = tokens().chunk(layout.replicas)[layout.part]
    for _ in range(2):
        step(net, optimizer, accelerator.backward, accelerator.clip_grad_norm_, rows)
    accelerator.save_state(str(folder / after))
    accelerator.save_model(net, folder / after / "exported")
    accelerator.wait_for_everyone()
