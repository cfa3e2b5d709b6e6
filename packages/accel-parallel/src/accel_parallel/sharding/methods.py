"""Methods of a sharded model other than `forward`, for which alone torch gathers its parameters."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FunctionType, MethodType
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook

from accel_core._torch import shard_state
from accel_core.comm.tree import tree_leaves
from accel_core.errors import EngineUnavailableError

_MIXED = "mixed torch.Tensor and DTensor"
_INSTEAD = (
    "use fsdp_version=2; without gradients, call it under "
    "FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False)"
)


class _Methods(ABC):
    """What the public methods of a model do where they compute with its parameters, other than in its forward pass.

    A method is watched while it runs, for the first module that computes, so that those which only look after the model
    are called on one rank alone as before. Forward passes are not watched, and cost what they did.
    """

    def __init__(self, model: nn.Module) -> None:
        self._runs = False
        own = self._own(model)
        for name, function in _methods_of(model):
            reads = not own.isdisjoint(inspect.unwrap(function).__code__.co_names)
            vars(model)[name] = MethodType(self._watched(function, reads), model)

    def _watched(self, function: FunctionType, reads: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def method(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # One that another calls is part of it.
            if self._runs or torch.compiler.is_compiling() or not self._is_idle(model):
                return function(model, *args, **kwargs)
            reads_now = reads and any(isinstance(each, torch.Tensor) for each in tree_leaves((args, kwargs)))
            self._runs = True
            try:
                return self._run(
                    function.__qualname__, functools.partial(function, model, *args, **kwargs), model, reads_now
                )
            finally:
                self._runs = False

        return method

    @abstractmethod
    def _own(self, model: nn.Module) -> set[str]:
        """Return the names of the sharded parameters that a model itself has, and none of its modules."""

    @abstractmethod
    def _is_idle(self, model: nn.Module) -> bool:
        """Return whether a model's parameters are not gathered for a pass that runs."""

    @abstractmethod
    def _run(self, name: str, call: Callable[[], object], model: nn.Module, reads: bool) -> object:
        """Call a method, which reads a parameter of the model itself or does not."""


class GatheringMethods(_Methods):
    """Methods of a model that FSDP2 sharded: they compute as a forward pass does, with gradients."""

    def __init__(self, model: nn.Module) -> None:
        self._owners = WeakSet[nn.Module]()
        super().__init__(model)
        self._has_memory = False
        model.register_forward_pre_hook(self._gather_outside_inference, prepend=True)

    def watch(self, model: nn.Module) -> None:
        """Note which modules compute with sharded parameters."""
        self._owners.update(
            module
            for module in model.modules()
            if module is not model
            and (isinstance(module, FSDPModule) or any(isinstance(p, DTensor) for p in module._parameters.values()))
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _gather_outside_inference(self, model: nn.Module, _: object = None) -> None:
        """Before the first pass under `torch.inference_mode`, gather into memory that later passes can write to."""
        if torch.is_inference_mode_enabled() and not self._has_memory:
            self._has_memory = True
            with torch.inference_mode(False), torch.no_grad():
                for module in model.modules():
                    if isinstance(module, FSDPModule):
                        module.unshard()
                        module.reshard()

    def _own(self, model: nn.Module) -> set[str]:
        return {name for name, each in model._parameters.items() if isinstance(each, DTensor)}

    def _is_idle(self, model: nn.Module) -> bool:
        return bool(shard_state(model)._training_state.name == "IDLE")

    def _run(self, name: str, call: Callable[[], object], model: nn.Module, reads: bool) -> object:
        # Not torch's `register_fsdp_forward_method`, which gathers for methods that compute nothing too.
        state, gathered = shard_state(model), False
        cast = state._mp_policy.param_dtype

        def gather() -> None:
            nonlocal gathered
            if self._is_idle(model):
                if not gathered and cast in (torch.float16, torch.bfloat16):
                    stack.enter_context(torch.autocast(state._device.type, cast))
                self._gather_outside_inference(model)
                state._pre_forward(model, (), {})  # without what is given: torch would reduce where its gradient comes
                gathered = True

        found = None
        with ExitStack() as stack:
            handle = register_module_forward_pre_hook(lambda module, _: gather() if module in self._owners else None)
            stack.callback(handle.remove)
            try:
                if reads:
                    gather()
                found = call()
            except RuntimeError as error:
                if _MIXED not in str(error):
                    raise
                instead = "call torch.distributed.fsdp.register_fsdp_forward_method(model, …) after prepare()"
                raise _refusal(name, "reads a sharded parameter by itself", instead) from error
            finally:
                if gathered:
                    found = state._post_forward(model, (), found)
        return found


class RefusingMethods(_Methods):
    """Methods of a model that FSDP1 wrapped: refused where they would compute with pieces of parameters."""

    def __init__(self, model: nn.Module, wrapper: nn.Module) -> None:
        self._wrapper: ReferenceType[nn.Module] = ref(wrapper)
        super().__init__(model)

    def _own(self, model: nn.Module) -> set[str]:
        wrapper: Any = self._wrapper()
        handle = wrapper._handle
        return set() if handle is None else {name for name, own, _ in handle.flat_param._param_infos if own is model}

    def _is_idle(self, model: nn.Module) -> bool:
        wrapper: Any = self._wrapper()
        return wrapper is not None and wrapper.training_state.name == "IDLE"

    def _run(self, name: str, call: Callable[[], object], model: nn.Module, reads: bool) -> object:
        def refuse(module: nn.Module, _: object = None) -> None:
            if not self._is_idle(model):
                return
            wrapper: Any = self._wrapper()
            wrapper.check_is_root()  # or torch would take a block that is called before its model for a model
            handle = wrapper._handle
            is_cut = handle is not None and module in handle.flat_param._modules and handle.needs_unshard()
            # Blocks gather for themselves, and only a pass through the whole completes their gradients.
            if is_cut or (torch.is_grad_enabled() and isinstance(module, FullyShardedDataParallel)):
                raise _refusal(name, "computes with pieces of parameters", _INSTEAD)

        handle = register_module_forward_pre_hook(refuse)
        try:
            if reads:
                refuse(model)
            return call()
        finally:
            handle.remove()


def _methods_of(model: nn.Module) -> Iterator[tuple[str, FunctionType]]:
    """Yield the public methods that the classes of a model have, beside those of every module of torch."""
    ours = (kind for kind in type(model).__mro__ if kind.__module__.partition(".")[0] != "torch")
    names = {name for kind in ours for name in vars(kind) if not name.startswith("_")}
    for name in sorted(names - set(dir(nn.Module)) - vars(model).keys()):
        method: Any = inspect.getattr_static(model, name)
        runs_later = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
        # They run after the call, when nothing is gathered.
        if isinstance(method, FunctionType) and not any(is_so(method) for is_so in runs_later):
            yield name, method


def _refusal(name: str, what: str, instead: str) -> EngineUnavailableError:
    return EngineUnavailableError(
        f"FSDP gathers parameters for forward passes; got {name}(), which {what}. "
        f"Compute this in forward(), or {instead}."
    )
