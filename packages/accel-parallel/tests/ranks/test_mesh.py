"""Meshes of several axes: what they refuse, and eight ranks on three axes, by the conformance suite."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from several_ranks import COPIES, LAYERS, WHOLE, advance, fsdp, refused, split
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, DistributedSampler

from accel_core._torch import enable_async_tp
from accel_core.accelerator import Accelerator
from accel_core.data.prepare import prepare_data_loader
from accel_core.data.presharded import already_sharded
from accel_core.errors import AccelError, ConfigurationError, EngineUnavailableError, PreparationError
from accel_core.host.versions import is_torch_version
from accel_core.plugins.parallelism import ParallelismConfig, TorchTensorParallelConfig
from accel_core.process.world import ensure
from accel_core.state import reset_all
from accel_core.state.run import AcceleratorState
from accel_parallel.averaging import Averaging
from accel_parallel.fsdp2.strategy import FullyShardStrategy
from accel_parallel.mesh.strategy import MeshStrategy
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_testing import requires, world
from accel_testing.conformance.strategy import Case, StrategyConformance, model

PLAN = {"0": "colwise", "2": "rowwise"}


def axes(**sizes: int) -> ParallelismConfig:
    """Return the axes of a mesh, with a plan for the suite's model."""
    return split(PLAN, **{"tp_size": 1} | sizes)


def sharded(version: int = 2) -> FullyShardedDataParallelPlugin:
    """Return a plugin of FSDP that gives every rank whole states, and shards each layer."""
    return fsdp(version, **WHOLE, **LAYERS)


RUNS: dict[str, tuple[type[AccelError], str, Callable[[], dict[str, Any]]]] = {
    "sizes": (ConfigurationError, "got 4 and 2 processes", lambda: {"parallelism_config": axes(tp_size=4)}),
    "FSDP without shards": (
        ConfigurationError,
        r"got the axes \['tp'\]",
        lambda: {"parallelism_config": axes(tp_size=2), "fsdp_plugin": sharded()},
    ),
    "FSDP1 and products": (
        EngineUnavailableError,
        r"FSDP1 .*\['tp'\]",
        lambda: {"parallelism_config": axes(tp_size=2), "fsdp_plugin": sharded(1)},
    ),
    "sequences without DeepSpeed": (
        ConfigurationError,
        "got sp_size=2 and the engine 'mesh'",
        lambda: {"parallelism_config": ParallelismConfig(sp_size=2)},
    ),
    "fp8": (
        ConfigurationError,
        "got mixed_precision='fp8'",
        lambda: {"parallelism_config": axes(tp_size=2), "mixed_precision": "fp8"},
    ),
}


@world(2)
def test_runs_that_a_mesh_does_not_do_are_refused() -> None:
    """Sizes, engines and formats that do not fit are named, no run is set up, and the next one trains."""
    for name, (error, words, given) in RUNS.items():
        with pytest.raises(AccelError, match=words) as refusal:
            Accelerator(cpu=True, **given())
        assert type(refusal.value) is error, name
        assert AcceleratorState._shared_state == {}, name
        assert not torch.distributed.is_initialized() or name == "fp8", name  # a format is looked at last
    accelerator = Accelerator(cpu=True, parallelism_config=axes(tp_size=2))
    net = model(dtype=torch.float32)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    advance(net(torch.ones(2, 4)).sum(), optimizer, run=accelerator)
    assert net[0].weight.to_local().shape == (3, 4)


@world(2)
def test_objects_that_a_mesh_does_not_train_are_refused() -> None:
    """A LOMO optimizer and loaders split by rank are named, with the model as it was; one split by replica is read."""
    library = pytest.importorskip("lomo_optim", reason="needs the library lomo_optim, not installed here")
    rows = list(range(4))
    by_rank = DistributedSampler(rows, 2, ensure().rank)
    for sizes in ({"tp_size": 2}, {"cp_size": 2}):
        accelerator = Accelerator(cpu=True, parallelism_config=axes(**sizes))
        net = model()
        objects = {
            "LOMO": lambda net=net: library.Lomo(net, lr=0.1),
            "part 0 of 1; got .* by already_sharded": lambda: already_sharded(DataLoader(rows)),
            r"DistributedSampler \(rank=\d, num_replicas=2\)": lambda: DataLoader(rows, sampler=by_rank),
        }
        for words, make in objects.items():
            with refused(PreparationError, words, accelerator, net):
                accelerator.prepare(net, make())
        with pytest.raises(PreparationError, match="by already_sharded"):
            accelerator.prepare_data_loader(already_sharded(DataLoader(rows)))
        mine = prepare_data_loader(DataLoader(rows), sharding="local", torch_device_mesh=accelerator.torch_device_mesh)
        assert [int(batch) for batch in accelerator.prepare(mine)] == rows
        reset_all()


class Called(TorchFunctionMode):
    """Notes the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


@world(2)
def test_averaging_all_gradients_reads_no_device() -> None:
    """Only a rank that lacks one asks whether another has it; one that nobody has stays away on both."""
    rank, net = ensure(cpu=True).rank, nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in range(3))
    averaging, parameters = Averaging(torch.device("cpu"), [torch.distributed.group.WORLD]), list(net)
    averaging.watch(net, parameters)
    for has, expected in (((3, 3), [0.5] * 3), ((3, 2), [0.5, 0.5, 0.0]), ((2, 1), [0.5, 0.0, None])):
        for place, each in enumerate(parameters):
            each.grad = torch.full((2,), float(rank)) if place < has[rank] else None
        with Called() as called:
            averaging.complete()
        assert called.names.isdisjoint({"tolist", "tensor"}) == (has[rank] == 3), has
        assert [None if each.grad is None else float(each.grad[0]) for each in parameters] == expected


@world(2)
def test_overlap_is_switched_on_by_torchs_own_names() -> None:
    """Without CUDA, `enable_async_tp` is a warning; its settings hold for any group."""
    from torch._inductor import config
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

    handler = TorchTensorParallelConfig(tp_plan=PLAN, enable_async_tp=True)
    with pytest.warns(UserWarning, match="got enable_async_tp=True on cpu"):
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, tp_handler=handler))
    group = accelerator.torch_device_mesh["tp"].get_group()
    assert not config._micro_pipeline_tp
    with warnings.catch_warnings(record=True) as warned:
        enable_async_tp(group)
    assert config._micro_pipeline_tp
    if is_torch_version("<", "2.15"):
        assert is_symm_mem_enabled_for_group(group.group_name)
    else:  # there every group is, where there is an accelerator
        assert not warned


@pytest.mark.full("compiled once more")
@requires("torch:2.11")  # before, torch's compiler could not look up axes of any mesh
@world(2)
def test_the_compiler_traces_the_mesh_of_a_run() -> None:
    """Its axes are asked for, and their sizes and places known, in one graph."""
    mesh: Any = Accelerator(cpu=True, parallelism_config=axes(tp_size=2)).torch_device_mesh

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return x * mesh["tp"].size() + mesh.get_group("tp").size() + mesh.get_local_rank("tp")

    assert compiled(torch.ones(())) == 4 + mesh.get_local_rank()


@requires("torch:2.8")  # FSDP2 on a CPU
@world(2)
def test_the_mesh_of_a_run_is_torchs_own() -> None:
    """FSDP2, DTensor, copies and pickles treat it as a mesh of torch's; of an axis of one rank it knows nothing."""
    axes = ParallelismConfig(dp_shard_size=2)
    mesh: Any = Accelerator(cpu=True, fsdp_plugin=sharded(), parallelism_config=axes).torch_device_mesh
    own = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    assert isinstance(mesh, DeviceMesh)
    assert mesh.__class__ is DeviceMesh
    assert {mesh: "found"}[own] == "found"
    assert mesh == own == mesh["dp_shard"]
    assert repr(mesh) == repr(own)
    for copied in (copy.copy(mesh), copy.deepcopy(mesh), pickle.loads(pickle.dumps(mesh))):
        assert type(copied) is DeviceMesh
        assert copied == mesh
        assert copied.get_group("dp_shard").size() == 2
    assert b"accel" not in pickle.dumps(mesh)
    with pytest.raises(KeyError, match=r"tp.*dp_shard"):
        mesh["tp"]

    nets = [fully_shard(model(dtype=torch.float32), mesh=each) for each in (mesh, own)]
    for net in nets:
        net(torch.ones(2, 4)).sum().backward()
    first, second = (net[0].weight for net in nets)
    assert first.device_mesh is mesh
    assert torch.equal(first.grad.full_tensor(), second.grad.full_tensor())
    file = io.BytesIO()
    torch.save(nets[0].state_dict(), file)
    assert b"accel" not in file.getvalue()
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["0.weight"].to_local(), second.to_local())

    rows = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    assert torch.equal((rows + distribute_tensor(torch.ones(4), own, [Shard(0)])).full_tensor(), torch.arange(1.0, 5.0))


@world(4)
def test_a_loader_that_is_split_by_replica_is_read_as_it_is() -> None:
    """Ranks of a replica that give the same part may say so, and each sample counts once; other splits are refused."""
    accelerator = Accelerator(cpu=True, parallelism_config=axes(dp_replicate_size=2, tp_size=2))
    rows, part = list(range(6)), accelerator.data_parallel_rank
    assert (part, accelerator.tensor_parallel_rank) == divmod(accelerator.process_index, 2)
    loader = DataLoader(rows, sampler=DistributedSampler(rows, 2, part, shuffle=False))
    found: list[int] = []
    for batch in accelerator.prepare(already_sharded(loader)):
        found += accelerator.gather_for_metrics(batch).tolist()
    assert sorted(found) == rows
    wrong = already_sharded(DataLoader(rows, sampler=DistributedSampler(rows, 4, ensure().rank, shuffle=False)))
    with pytest.raises(PreparationError, match=rf"here part {part} of 2; got .*num_replicas=4"):
        accelerator.prepare(wrong)


class OnThreeAxes(StrategyConformance):
    """The suite on a mesh of some sizes."""

    def __init__(self, **sizes: int) -> None:
        self.sizes_of_axes = sizes
        self.shards = "dp_shard_size" in sizes
        self.strategy = FullyShardStrategy if self.shards else MeshStrategy  # type: ignore[misc]

    def arguments(self) -> dict[str, Any]:
        """Return the axes, and a plugin where parameters are sharded."""
        plugin = {"fsdp_plugin": sharded()} if self.shards else {}
        return {"parallelism_config": axes(**self.sizes_of_axes), **plugin}


@pytest.mark.full("more axes at once")
@requires("torch:2.8")
@world(8)
def test_eight_ranks_on_three_axes_equal_one_process(tmp_path: Path) -> None:
    """Copies of shards of a split model, and shards along sequences of one, are trained, resumed and fed as by one."""
    case = Case(accumulation=3, weighted=True, clip=0.05, uneven=True)
    copies = OnThreeAxes(**COPIES, tp_size=2)
    sequences = OnThreeAxes(dp_shard_size=2, cp_size=2, tp_size=2)
    for check in (
        partial(copies._equals_one_process, case),
        partial(copies._restores, tmp_path, fresh=True),
        partial(sequences._equals_one_process, case),
        sequences._seeds,
        partial(sequences._reads_once, dispatch=True),
    ):
        check()
        reset_all()


@world(2)
def test_ranks_that_share_sequences_pass_the_suite(tmp_path: Path) -> None:
    """Two ranks that share sequences do what every strategy has to do."""
    tests = OnThreeAxes(cp_size=2)
    for check in (
        partial(tests._equals_one_process, Case(accumulation=2, weighted=True, clip=0.05)),
        tests._synchronises_late,
        tests._trains_on_nothing,
        tests._prepares_twice,
        tests._seeds,
        partial(tests._restores, tmp_path / "state", fresh=True),
        partial(tests._saves_model, tmp_path / "model"),
        partial(tests._reads_once, dispatch=False),
        tests._refuses,
    ):
        check()
        reset_all()


@world(2)
def test_shards_without_a_plugin_of_fsdp_are_refused() -> None:
    """Axes that FSDP trains along are an error on every rank without it, before anything changes."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=2))
    net = model()
    with refused(ConfigurationError, r"\['dp_shard'\] and no plugin of FSDP", accelerator, net):
        accelerator.prepare(net)
