"""Models loaded sharded, as by transformers with a `DistributedConfig`: they keep their layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn
from weakref import WeakSet

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accel_core._torch import shard_groups
from accel_core.comm.control import in_step
from accel_core.errors import ConfigurationError, PartView, PreparationError
from accel_core.mesh.layout import DATA_AXES, Layout
from accel_core.mesh.tensor import is_spread
from accel_core.options.enums import DistributedType
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.precision.precision import Precision
from accel_core.runtime import Runtime
from accel_core.state.run import AcceleratorState, decided
from accel_core.strategies import recipe
from accel_core.strategies.parts import Parts, PrecisionRequest
from accel_core.strategies.strategy import Strategy, strategy_of
from accel_parallel.fsdp2.strategy import FullyShardStrategy
from accel_parallel.mesh.strategy import MeshStrategy
from accel_parallel.plugin import FullyShardedDataParallelPlugin
from accel_parallel.sharding.wrapping import WrapPlan
from accel_parallel.tensor.split import refuse_scattered

_OPEN = ("arrived", "ddp", "fsdp2", "mesh")
"""Strategies whose runs go on with models that arrive sharded."""


class ArrivedStrategy(FullyShardStrategy):
    """Models keep the shards, and the reduction of gradients, with which they arrived: they are not wrapped or moved.

    What every rank holds whole, such as adapters that were added, starts from the values of the first rank, and its
    gradients are averaged here.
    """

    name = "arrived"
    initializes = False
    receives_weights = False

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._taken = WeakSet[nn.Module]()

    @property
    def mixes(self) -> bool:
        """Whether parameters lie on several meshes, which the model decides."""
        return True

    def label(self) -> DistributedType:
        """Return the label of several processes on this device: no engine was asked for."""
        return self.world.hardware.label

    def precision(self, asked: PrecisionRequest) -> Precision:
        """Return the number format of autocast; refuse fp8, for which layers are exchanged."""
        if asked.name == "fp8":
            raise ConfigurationError(
                "Layers of a model that arrives sharded cannot be exchanged for layers in fp8; got "
                "mixed_precision='fp8'. Use mixed_precision='bf16', 'fp16' or 'no'."
            )
        return super().precision(asked)

    def plan(self, model: nn.Module) -> WrapPlan:
        """Return nothing: a model keeps its layout."""
        return WrapPlan((), ())

    def is_prepared(self, model: nn.Module) -> bool:
        """Return whether a model was prepared here before."""
        return self._bare(model) in self._taken

    def convert(self, model: nn.Module) -> nn.Module:
        """Leave a model as it is: its shards have the number format that they arrived in."""
        return model

    def split(self, model: nn.Module) -> nn.Module:
        """Leave a model as it is."""
        return model

    def compile_blocks(self, model: nn.Module) -> nn.Module:
        """Compile the modules that were sharded one by one in place, if the run compiles by region."""
        blocks = [each for each in model.modules() if isinstance(each, FSDPModule) and each is not model]
        recipe.compile_in_place(blocks or [model], self.parts.compilation)
        return model

    def distribute(self, model: nn.Module) -> nn.Module:
        """Follow what a model computes, and average what is whole in it."""
        self.adopt(model)
        self._taken.add(self._bare(model))
        return model


def take(runtime: Runtime, models: Sequence[nn.Module]) -> Strategy:
    """Return the strategy with which a run goes on that is given models, some of which are spread over ranks.

    The model decides, unless the run has an engine or axes already: those have to fit. Nothing is changed before.

    Raises:
        ConfigurationError: The run has an engine, a plugin or axes that do not fit them.
        PreparationError: They lie on a mesh that the ranks of the run do not form, or come too late.
        RankDisagreementError: Models arrive otherwise on other ranks.
    """
    strategy = runtime.strategy
    new = [strategy.unwrap(each, keep_torch_compile=False) for each in models if strategy_of(each) is not strategy]
    arrived = {each: axes_of(each, runtime.world.size) for each in new if any(map(is_spread, each.parameters()))}
    for model, found in arrived.items():
        _refuse_misfit(strategy, model, found)
    if isinstance(strategy, ArrivedStrategy) or strategy.name == "fsdp2":
        return strategy
    sharded = next((each for each in arrived if _records(each)), None)
    if not arrived or (sharded is None and strategy.name == "mesh"):
        return strategy
    parts, axes = strategy.parts, strategy.parts.parallelism
    if axes is None or axes.total_size == 1:
        sizes: dict[str, Any] = {**arrived[next(iter(arrived)) if sharded is None else sharded]}
        axes = ParallelismConfig(**sizes, cp_size=1, sp_size=1)
    layout = Layout.of(parts.world.rank, parts.world.size, axes.sizes)
    _refuse_late(runtime, layout)
    # Ranks make the groups of a mesh together: one whose model is refused, or arrives whole, is known of before.
    axes_of_run = {axis: PartView(str(size)) for axis, size in layout.sizes}
    with in_step(parts.world, "prepare: a model that arrives sharded", axes_of_run):
        mesh = axes.get_device_mesh(parts.world.device.type)
        parts = replace(parts, layout=layout, mesh=mesh, parallelism=axes)
        if sharded is None:
            follower: Strategy = MeshStrategy(parts)
        else:
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
            follower = ArrivedStrategy(replace(parts, plugins=(plugin, *parts.plugins)))
    known = decided()
    if known is not None:
        state = AcceleratorState()
        state._publish(replace(known, layout=layout), state.distributed_type)
    return follower


def axes_of(model: nn.Module, ranks: int) -> dict[str, int]:
    """Return the sizes of the axes along which a bare model is spread, as `ParallelismConfig` names them.

    What is sharded by FSDP2 says who reads which part of the data; ranks that it leaves over, or all ranks that hold
    parts of one tensor where nothing is sharded by FSDP2, work on the same data.

    Raises:
        PreparationError: These are not the axes of a mesh of so many ranks, or nobody reduces some gradients.
    """
    stages = getattr(getattr(getattr(model, "config", None), "distributed_config", None), "pp_size", None)
    if stages not in (None, 1):
        raise PreparationError(
            "A model that arrives sharded has a part of each of its layers on every rank; got "
            f"{type(model).__name__} with pp_size={stages}, which deals layers out. Load it with pp_size=1."
        )
    records = _records(model)
    spread = {name: each for name, each in model.named_parameters() if isinstance(each, DTensor)}
    if not records:
        name, first = next(iter(spread.items()))
        tp = first.device_mesh.size()
        if ranks % tp:
            _refuse_mesh(name, first, ranks)
        return {"dp_replicate_size": ranks // tp, "dp_shard_size": 1, "tp_size": tp}
    info = max((record.mesh_info for record in records), key=lambda each: int(each.mesh.size()))
    axes = (info.replicate_mesh_dim, info.shard_mesh_dim)
    copies, shards = (1 if axis is None else info.mesh.size(axis) for axis in axes)
    sizes = {"dp_replicate": copies, "dp_shard": shards, "tp": max(1, ranks // (copies * shards))}
    reduced = {id(own) for each in model.modules() if isinstance(each, FSDPModule) for own in each.parameters()}
    everyone, readers, found = list(range(ranks)), info.mesh.mesh.flatten().tolist(), False
    for name, parameter in spread.items():
        on = parameter.device_mesh.mesh.flatten().tolist()
        found = found or on == everyone
        if on not in (everyone, readers):
            _refuse_mesh(name, parameter, ranks)
        if parameter.requires_grad and id(parameter) not in reduced:
            raise PreparationError(
                "In a model that arrives sharded, FSDP2 reduces the gradients of every parameter that is spread over "
                f"ranks; got {name}, which trains and is in no module that fully_shard was called on. Call it on all "
                "of the model, or freeze this parameter."
            )
        refuse_scattered(name, parameter)
    fits = found and copies * shards * sizes["tp"] == ranks
    if not fits or list(Layout.of(dist.get_rank(), ranks, sizes).group(*DATA_AXES)) != readers:
        _refuse_mesh(*next(iter(spread.items())), ranks)
    return {f"{axis}_size": size for axis, size in sizes.items()}


def _records(model: nn.Module) -> list[Any]:
    """Return torch's records of what FSDP2 gathers and reduces together in a model."""
    parts = [each for each in model.modules() if isinstance(each, FSDPModule)]
    for each in parts:
        each.reshard()  # a pass without gradients may have left some of them gathered
    return [record for each in parts for record in shard_groups(each)]


def _refuse_mesh(name: str, parameter: DTensor, ranks: int) -> NoReturn:
    mesh = parameter.device_mesh
    raise PreparationError(
        f"A model that arrives sharded lies on a mesh of all {ranks} processes of the run, in their order; got "
        f"{name} with {parameter.placements} on a mesh of shape {tuple(mesh.shape)} with the ranks "
        f"{mesh.mesh.flatten().tolist()}. Load it in this run, with sizes whose product is {ranks}."
    )


def _refuse_misfit(strategy: Strategy, model: nn.Module, sizes: Mapping[str, int]) -> None:
    """Refuse an engine, a plugin or axes that do not fit a model that arrived spread over ranks."""
    word = type(model).__name__
    if strategy.name not in _OPEN:
        raise ConfigurationError(
            f"A model that was loaded sharded keeps its layout; got {word} and the engine {strategy.name!r}. Leave "
            "its plugin out, or load the model whole."
        )
    own = {f"{axis}_size": strategy.layout.size(axis) for axis in ("dp_replicate", "dp_shard", "tp")}
    readers = sizes["dp_replicate_size"] * sizes["dp_shard_size"]
    # transformers' Trainer calls all ranks that read other data shards, copies among them.
    known = [sizes, {**sizes, "dp_replicate_size": 1, "dp_shard_size": readers}]
    given = strategy.parts.parallelism is not None and strategy.parts.parallelism.total_size > 1
    if ((given or strategy.name in ("arrived", "fsdp2")) and own not in known) or strategy.layout.size("cp") > 1:
        raise ConfigurationError(
            f"The axes of a run are those of the model that arrives sharded; got {word} with {_listed(sizes)} and a "
            f"run with {_listed(own)}. Leave parallelism_config out, or load the model with the sizes of the run."
        )
    if strategy.name == "fsdp2" and strategy.parts.plugin.activation_checkpointing:
        raise ConfigurationError(
            f"A model that arrives sharded is not changed by the FSDP plugin; got {word} and "
            "activation_checkpointing=True. Call model.gradient_checkpointing_enable(), and leave it out."
        )


def _refuse_late(runtime: Runtime, layout: Layout) -> None:
    """Refuse to change the way in which a run trains what it has prepared already."""
    trained = any(p.requires_grad for each in runtime.models for p in each.parameters())
    split = runtime.dataloaders and layout.parts != runtime.layout.parts
    early = {"an optimizer": runtime.optimizers, "a model that trains": trained, "a loader for other ranks": split}
    found = [word for word, there in early.items() if there]
    if found:
        raise PreparationError(
            "A model that arrives sharded decides how a run trains, so it is prepared first, or together with the "
            f"rest; got one after {' and '.join(found)}. Pass all of them to one prepare()."
        )


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())
