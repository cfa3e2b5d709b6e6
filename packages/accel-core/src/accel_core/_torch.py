"""What of torch is private, or is not the same in all versions from 2.8 on, each imported here and nowhere else.

A private name may change with any release of torch: `tests/unit/private_names.txt` has the reason why no public one
serves, and a test looks each of them up in the installed torch. What stands in for something that older versions lack
names the version that ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import _amp_foreach_non_finite_check_and_unscale_ as unscale_and_check_
from torch import _foreach_mul_ as foreach_mul_
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import __version__ as torch_version

__all__ = [
    "after_gradients",
    "all_gather_single",
    "call_hooks",
    "calls_of",
    "compiles_itself",
    "ddp_figures",
    "default_store",
    "enable_async_tp",
    "enclose_calls",
    "fake_errors",
    "fake_mode",
    "foreach_mul_",
    "group_gather",
    "has_gradient_hooks",
    "is_in_backward",
    "reduce_scatter_single",
    "ring_attention",
    "run_gradient_hooks",
    "shard_groups",
    "shard_state",
    "storage_info",
    "unscale_and_check_",
]

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gathers one tensor from all ranks into one tensor, which torch called otherwise until 2.13."""

reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Adds up one tensor of all ranks and leaves each a part of it, which torch called otherwise until 2.13."""


def group_gather(group: Any) -> Callable[..., Any]:
    """Return a process group's own method for the same, which torch called otherwise until 2.13."""
    method: Callable[..., Any] = getattr(group, "all_gather_single", None) or group._allgather_base
    return method


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Return whether functions of a user see a parameter's gradients, or follow when they are there."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def run_gradient_hooks(parameter: torch.Tensor) -> None:
    """Call the functions of a user that follow a parameter's gradient, which was not added up by torch."""
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)


def call_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """Return the functions that see the calls of a module, or what comes back through them."""
    kinds = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return [hook for hooks in kinds for hook in hooks.values()]


class _Enclosed(partial[Any]):
    """A call of a module that goes through a function; its last argument is what the call was before."""


def enclose_calls(module: torch.nn.Module, function: Callable[..., Any]) -> None:
    """Let calls of a module go through a function, around its hooks and what compiles it; copies of it stay plain.

    The function is given what the call was before, and the arguments.
    """
    module._compiled_call_impl = _Enclosed(function, module._compiled_call_impl or module._call_impl)


def calls_of(module: torch.nn.Module) -> list[Any]:
    """Return what a call of a module goes through, the outermost first, and last what compiles it, or `None`."""
    found: list[Any] = [module._compiled_call_impl]
    while isinstance(found[-1], _Enclosed):
        found.append(found[-1].args[-1])
    return found


def compiles_itself(module: torch.nn.Module) -> bool:
    """Return whether a module was compiled in place."""
    return calls_of(module)[-1] not in (None, module._call_impl)


def ddp_figures(wrapper: DistributedDataParallel) -> dict[str, object]:
    """Return what `DistributedDataParallel` tells of itself, as of now; it tells nothing before its first step."""
    wrapper.logger.set_runtime_stats_and_log()  # type: ignore[union-attr]
    return dict(wrapper._get_ddp_logging_data())  # type: ignore[no-untyped-call]


def after_gradients(function: Callable[[], None]) -> None:
    """Call a function when the backward pass under way has computed all gradients, before what is put in line later."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_in_backward() -> bool:
    """Return whether a backward pass is under way."""
    return torch._C._current_graph_task_id() != -1


def ring_attention() -> Any:
    """Return the module that has torch's ring of context parallel."""
    # Imported late: it loads torch's sharding rules, which a run without context parallel does not need.
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention


def fake_mode() -> Any:
    """Return a mode in which tensors have a device and no memory."""
    # Imported late: few runs need it.
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_errors() -> tuple[type[Exception], ...]:
    """Return what is raised where a computation reads a value of a tensor without memory."""
    from torch._subclasses import fake_tensor

    return fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException


def enable_async_tp(group: dist.ProcessGroup) -> None:
    """Let what torch compiles for CUDA send parts of a product while it computes others; for the whole process."""
    # Imported late: it loads the compiler's settings, which few runs need.
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    if torch_version < "2.15":  # from then on every group is ready, and the call only warns
        enable_symm_mem_for_group(group.group_name)
    config._micro_pipeline_tp = True


def shard_groups(module: object) -> list[Any]:
    """Return torch's records of what `fully_shard` gathers and reduces together of a module: one, or none."""
    state = shard_state(module)
    if hasattr(state, "_fsdp_param_groups"):  # later versions: a module may have several
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def shard_state(module: Any) -> Any:
    """Return torch's record of a module that `fully_shard` sharded."""
    return module._get_fsdp_state()


def storage_info(file: str, offset: int, length: int) -> Any:
    """Return the record by which a list of shards says where a piece lies."""
    # Imported late: a run that saves no shards starts without torch's checkpoints.
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)
