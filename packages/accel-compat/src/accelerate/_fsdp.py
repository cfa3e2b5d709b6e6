"""The functions of Accelerate that shard a model step by step, for code that prepares models without `prepare`.

Each takes the steps of accel's own strategies, one by one. Of the accelerator that is given they read
`mixed_precision`, `torch_device_mesh`, `device` and `state.fsdp_plugin`, so anything with these attributes will do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import nn

import accel_parallel
from accel_core.errors import PreparationError
from accel_core.mesh.tensor import placed_like
from accel_core.modules.compilation import compile_regions_in_place
from accel_core.modules.ties import tied_tensor_groups
from accel_core.modules.unwrap import canonical_name
from accel_core.process.world import ensure
from accel_core.strategies.recipe import inside
from accel_parallel import fsdp2, sharding
from accel_parallel.plugin import FullyShardedDataParallelPlugin

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_T = TypeVar("_T")


class _State(Protocol):
    fsdp_plugin: Any


class _Accelerator(Protocol):
    """What is read of an accelerator."""

    @property
    def mixed_precision(self) -> str: ...

    @property
    def torch_device_mesh(self) -> DeviceMesh | None: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def state(self) -> _State: ...


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: torch.device
) -> Callable[[nn.Module], Any]:
    """Return an initializer of meta weights that keeps ties: what is one parameter before is one afterwards."""
    groups = tied_tensor_groups(model, include_buffers=False)  # before: initializers make other parameters of each
    tied = {id(model.get_parameter(group[0])): model.get_parameter(group[0]) for group in groups}
    if not tied:
        return param_init_fn
    made: dict[int, nn.Parameter | None] = {}  # the first that is made stands for all

    def initialize(module: nn.Module) -> object:
        before = {name: id(own) for name, own in module._parameters.items() if id(own) in tied}
        result = param_init_fn(module)
        for name, key in before.items():
            module._parameters[name] = made.setdefault(key, module._parameters[name])
        return result

    return initialize


def fsdp2_apply_ac(accelerator: _Accelerator, model: nn.Module) -> nn.Module:
    """Let the blocks of a model keep their inputs only and compute the rest again in the backward pass.

    Raises:
        PreparationError: No block was found.
    """
    plugin = accelerator.state.fsdp_plugin
    plan = sharding.wrapping.plan(inside(model), plugin)
    plan.refuse_one_piece(model)
    sharding.recomputing.recompute(
        (block for _, block in plan.blocks), offload=bool(plugin.activation_checkpointing_offload)
    )
    return model


def fsdp2_canonicalize_names(named_params: Mapping[str, _T]) -> dict[str, _T]:
    """Return named values under the names that the bare model has.

    >>> fsdp2_canonicalize_names({"_orig_mod.layers.0._checkpoint_wrapped_module.weight": 1})
    {'layers.0.weight': 1}
    """
    return {canonical_name(name): value for name, value in named_params.items()}


def fsdp2_load_full_state_dict(
    accelerator: _Accelerator, model: nn.Module, full_sd: Mapping[str, torch.Tensor], cpu_offload: bool = False
) -> None:
    """Give a model that FSDP2 sharded the whole state that the first rank has; every rank calls it.

    Raises:
        CheckpointMismatchError: A name is missing or unknown, or a shape differs; on every rank, and nothing changed.
    """
    target = torch.device("cpu") if cpu_offload else accelerator.device
    sharding.loading.load_whole_state(inside(model), full_sd, ensure(), target)


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: nn.Module
) -> Callable[[nn.Module], bool] | None:
    """Return whether a module is sharded on its own, as a function of the module.

    Raises:
        ConfigurationError: A class that is named does not occur in the model.
    """
    policy = sharding.wrapping.wrap_policy(model, fsdp2_plugin)
    if policy is None:
        return None

    def chosen(module: nn.Module) -> bool:
        size = sum(parameter.numel() for parameter in module.parameters())
        return bool(policy(module=module, recurse=False, nonwrapped_numel=size))

    return chosen


def fsdp2_prepare_model(accelerator: _Accelerator, model: nn.Module) -> nn.Module:
    """Shard a model in place; every rank calls it. `Accelerator.prepare` also averages what is left whole.

    Raises:
        PreparationError: Not even the first rank has the weights.
        StateError: There is no process group.
    """
    bare = inside(model)
    if fsdp2.in_place.is_sharded(bare):  # in place, so nobody has to know who came first
        return model
    plugin, world = accelerator.state.fsdp_plugin, ensure()
    mesh = sharding.mesh.data_part(accelerator.torch_device_mesh, accelerator.device)
    plan = sharding.wrapping.plan(bare, plugin)
    sharding.loading.refuse_empty(bare, world)
    if accelerator.mixed_precision != "no":  # or updates smaller than half precision would be lost
        sharding.param_attrs.keep_masters(bare)
    fsdp2.in_place.shard(bare, plan, plugin, mesh, world)
    return model


def fsdp2_switch_optimizer_parameters(
    optimizer: torch.optim.Optimizer, mapping: Mapping[Any, torch.nn.Parameter]
) -> None:
    """Point an optimizer at the parameters that sharding put in place of those that it holds, its state with them.

    Raises:
        PreparationError: One is not in the mapping; nothing was changed.
    """
    found: list[tuple[list[Any], int, torch.nn.Parameter]] = []
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            key = _key_of(parameter, mapping)
            if key is None:
                raise PreparationError(
                    "An optimizer can be pointed at sharded parameters only where each of its own has one; got a "
                    f"parameter of shape {tuple(parameter.shape)} in group {number} that is not in the mapping. "
                    "Prepare the model together with its optimizer."
                )
            found.append((group["params"], place, mapping[key]))
    for parameters, place, new in found:
        # In place: optimizers such as LBFGS keep the list itself.
        old, parameters[place] = parameters[place], new
        if old in optimizer.state:
            optimizer.state[new] = {key: placed_like(value, new) for key, value in optimizer.state.pop(old).items()}


def _key_of(parameter: Any, mapping: Mapping[Any, object]) -> object:
    """Return under what a mapping has a parameter: itself, or its address, which stand-ins have as a plain number."""
    address = parameter.data_ptr
    keys = (parameter, address() if callable(address) else address)
    return next((key for key in keys if key in mapping), None)


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return torch's gradient scaler, which agrees over the shards of FSDP2."""
    return torch.amp.GradScaler(**kwargs)


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device
) -> set[nn.Parameter]:
    """Return the parameters that FSDP2 leaves unsharded, moved to the device where they are used."""
    given = sharding.wrapping.modules_named(model, modules) if isinstance(modules, str) else modules or ()
    found = {parameter for module in given for parameter in module.parameters()}
    for parameter in found:
        if not parameter.is_meta:  # one without values gets its device with them
            parameter.data = parameter.data.to(device)
    return found


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile the repeated blocks of a model that FSDP2 will shard, and what is beside them, in place; returns it."""
    return compile_regions_in_place(module, **compile_kwargs)


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: object,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write the weights of a sharded model as the plugin's `state_dict_type` says; every rank calls it.

    Raises:
        CheckpointError: Writing failed on a rank; every rank raises, and what was there before is intact.
        EngineUnavailableError: A file for each rank was asked for.
    """
    kind = _kind(fsdp_plugin, use_dcp)
    accel_parallel.fsdp_files.save_model(kind, model, Path(output_dir), model_index, adapter_only=adapter_only)


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: object,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Read what `save_fsdp_model` wrote, here or in Accelerate, into a sharded model; arguments as there.

    Raises:
        CheckpointError: It is missing, damaged, unsafe or does not fit; every rank raises, and nothing was changed.
        EngineUnavailableError: A file for each rank was asked for.
    """
    kind = _kind(fsdp_plugin, use_dcp)
    return accel_parallel.fsdp_files.load_model(kind, model, Path(input_dir), model_index, adapter_only=adapter_only)


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: object,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the state of a sharded model's optimizer, by names of parameters; every rank calls it.

    Raises:
        CheckpointError: As for `save_fsdp_model`.
        EngineUnavailableError: A file for each rank was asked for.
    """
    kind = _kind(fsdp_plugin, use_dcp)
    accel_parallel.fsdp_files.save_optimizer(kind, optimizer, model, Path(output_dir), optimizer_index)


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: object,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Read what `save_fsdp_optimizer` wrote, here or in Accelerate, into an optimizer; arguments as there.

    Raises:
        CheckpointError: As for `load_fsdp_model`.
        EngineUnavailableError: A file for each rank was asked for.
    """
    kind = _kind(fsdp_plugin, use_dcp)
    accel_parallel.fsdp_files.load_optimizer(kind, optimizer, model, Path(input_dir), optimizer_index)


def _kind(plugin: FullyShardedDataParallelPlugin, use_dcp: bool) -> str:
    """Return the name of the layout that a plugin asks for; without torch's checkpoints each rank has a file."""
    kind = str(getattr(plugin.state_dict_type, "name", plugin.state_dict_type))
    # Refused below, as other numbers of ranks could not read it.
    return "LOCAL_STATE_DICT" if kind == "SHARDED_STATE_DICT" and not use_dcp else kind
