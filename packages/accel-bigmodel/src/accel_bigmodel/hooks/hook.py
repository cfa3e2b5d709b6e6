"""Hooks around `forward`, and how they are put on a module and taken off again."""

import functools
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import torch
from torch import nn


class ModelHook:
    """Callbacks before and after a module's forward; they see its keyword arguments, and may change what they see.

    Attributes:
        no_grad: Whether the forward runs under `torch.no_grad()`.

    Examples:
        >>> class Double(ModelHook):
        ...     def post_forward(self, module, output):
        ...         return output * 2
        >>> layer = add_hook_to_module(torch.nn.Identity(), Double())
        >>> layer(torch.ones(2))
        tensor([2., 2.])
    """

    no_grad = False

    @property
    def moves_weights(self) -> bool:
        """Whether weights come and go with a forward: torch.compile then runs the hook between graphs, and not in one.

        Returns:
            False; a subclass may have a plain attribute instead.
        """
        return False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Act when the hook is put on a module.

        Args:
            module: The module.

        Returns:
            The module.
        """
        return module

    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Act before the forward.

        Args:
            module: The module whose forward follows.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            The arguments to call the forward with.
        """
        return args, kwargs

    def post_forward(self, module: nn.Module, output: object) -> Any:
        """Act after the forward.

        Args:
            module: The module whose forward ran.
            output: What it returned.

        Returns:
            What the caller gets.
        """
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Act when the hook is taken off a module.

        Args:
            module: The module.

        Returns:
            The module.
        """
        return module

    def abort_forward(self, module: nn.Module) -> None:
        """Act when the forward, or another hook, raised: `post_forward` will not be called.

        Args:
            module: The module whose forward failed.
        """

    def enter_forward(
        self, module: nn.Module, *args: object, **kwargs: object
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Begin a forward; once this has returned, exactly one of `leave_forward` and `abort_forward` follows.

        When this raises, the hook has cleaned up.

        Args:
            module: The module whose forward follows.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            The arguments to call the forward with; by default what `pre_forward` returns.
        """
        try:
            return self.pre_forward(module, *args, **kwargs)
        except BaseException:
            self.abort_forward(module)
            raise

    def leave_forward(self, module: nn.Module, output: object) -> Any:
        """End a forward that returned. When this raises, the hook has cleaned up after itself.

        Args:
            module: The module whose forward ran.
            output: What it returned.

        Returns:
            What the caller gets; by default what `post_forward` returns.
        """
        try:
            return self.post_forward(module, output)
        except BaseException:
            self.abort_forward(module)
            raise


class SequentialHook(ModelHook):
    """Several hooks as one: each event goes to all of them, in order.

    Args:
        hooks: The hooks.

    Examples:
        >>> from accel import AlignDevicesHook
        >>> hook = SequentialHook(ModelHook(), AlignDevicesHook(execution_device="cpu"))
        >>> layer = add_hook_to_module(torch.nn.Linear(2, 2), hook)
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    @property
    def moves_weights(self) -> bool:
        """Whether one of the hooks moves weights."""
        return any(hook.moves_weights for hook in self.hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Initialize every hook."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass the arguments through every hook."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: object) -> Any:
        """Pass the output through every hook."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Detach every hook."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module

    def enter_forward(
        self, module: nn.Module, *args: object, **kwargs: object
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Enter every hook; if one fails, those before it are notified that the forward will not run."""
        entered = 0
        try:
            for hook in self.hooks:
                args, kwargs = hook.enter_forward(module, *args, **kwargs)
                entered += 1
        finally:
            for hook in self.hooks[:entered] if entered < len(self.hooks) else ():
                hook.abort_forward(module)
        return args, kwargs

    def leave_forward(self, module: nn.Module, output: object) -> Any:
        """Leave every hook; if one fails, those after it are notified that the forward failed."""
        left = 0
        try:
            for hook in self.hooks:
                left += 1
                output = hook.leave_forward(module, output)
        finally:
            for hook in self.hooks[left:]:
                hook.abort_forward(module)
        return output

    def abort_forward(self, module: nn.Module) -> None:
        """Abort every hook."""
        for hook in self.hooks:
            hook.abort_forward(module)


def _picklable(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's forward in a form that another process can load."""
    if isinstance(forward, MethodType) and forward.__func__ is type(module).forward and forward.__name__ != "forward":
        # A bound method is pickled by the name of its function. That of a container such as `nn.ModuleList` is
        # `_forward_unimplemented`, which its class does not have: it could be pickled and not loaded.
        return functools.partial(forward.__func__, module)
    return forward


class HookedForward:
    """The forward of a module that carries a hook, shown as the one without it; copied and pickled with the module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # Two texts that the class has as well, and nothing that would be bound to this process and this module.
        forward = module.__dict__["_old_forward"]
        self.__doc__, self.__module__ = forward.__doc__, getattr(forward, "__module__", __name__)

    def of(self, module: nn.Module) -> "HookedForward":
        """Return the forward of a module that was copied from this one's, with its hook."""
        forward = module.__dict__["_old_forward"]
        if isinstance(forward, functools.partial) and forward.args == (self.module,):
            module.__dict__["_old_forward"] = functools.partial(forward.func, module)
        return HookedForward(module)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's forward without the hook, for `inspect.signature`."""
        forward: Callable[..., Any] | None = self.module.__dict__.get("_old_forward")
        if forward is None:
            raise AttributeError("__wrapped__")
        return forward

    def __getattr__(self, name: str) -> Any:
        """Look up names, and whatever else libraries put there, on the module's own forward."""
        module = self.__dict__.get("module")
        if module is None or "_old_forward" not in module.__dict__:  # being copied or unpickled
            raise AttributeError(name)
        return getattr(module.__dict__["_old_forward"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the hook and the forward; a graph is left for a hook that moves weights, and entered for the forward."""
        hook: ModelHook | None = self.module.__dict__.get("_hf_hook")
        if hook is None:  # it was taken off, and a library's forward calls this one
            return type(self.module).forward(self.module, *args, **kwargs)
        if "torch._dynamo" in sys.modules and hook.moves_weights:  # without the compiler nobody records a graph
            runner = _runner if _runner is not None else _make_runner()
            return runner(self, args, kwargs)
        return self.surround(hook, hook.enter_forward, hook.leave_forward, args, kwargs)

    def surround(
        self,
        hook: ModelHook,
        enter: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]],
        leave: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the forward between entering and leaving its hook."""
        module = self.module
        args, kwargs = enter(module, *args, **kwargs)
        try:
            forward = module.__dict__["_old_forward"]
            if hook.no_grad:
                with torch.no_grad():
                    output = forward(*args, **kwargs)
            else:
                output = forward(*args, **kwargs)
        except BaseException:
            hook.abort_forward(module)
            raise
        return leave(module, output)


def _run_eagerly(forward: HookedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run with the hook's own work outside any graph that torch.compile is recording."""
    hook: ModelHook = forward.module.__dict__["_hf_hook"]
    disable = cast(Any, torch.compiler.disable)
    return forward.surround(hook, disable(hook.enter_forward), disable(hook.leave_forward), args, kwargs)


_runner: Callable[..., Any] | None = None


def _make_runner() -> Callable[..., Any]:
    """Make the runner that torch.compile does not trace; late, because making it imports the compiler."""
    global _runner
    made: Callable[..., Any] = cast(Any, torch.compiler.disable)(_run_eagerly, recursive=False)
    _runner = made
    return made


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Put a hook on a module: its forward runs between `pre_forward` and `post_forward`.

    Args:
        module: The module, changed in place.
        hook: The hook.
        append: Whether to chain it after a hook that is already there; else that one is taken off first.

    Returns:
        The module.

    Examples:
        >>> from accel import AlignDevicesHook
        >>> model = add_hook_to_module(model, AlignDevicesHook(execution_device="cpu"))
        >>> model = add_hook_to_module(model, ModelHook(), append=True)
    """
    present = module.__dict__.get("_hf_hook")
    if present is not None and append:
        hook.init_hook(module)
        earlier = present.hooks if isinstance(present, SequentialHook) else (present,)
        object.__setattr__(module, "_hf_hook", SequentialHook(*earlier, hook))
        return module
    if present is not None:
        remove_hook_from_module(module)
    forward = module.forward
    own = module.__dict__.get("forward")
    module = hook.init_hook(module)
    # Past `__setattr__`, by which a compiled module hands attributes on to the module inside.
    object.__setattr__(module, "_old_forward", _picklable(module, forward))
    object.__setattr__(module, "_hf_hook", hook)
    object.__setattr__(module, "_accel_own_forward", own)
    object.__setattr__(module, "forward", HookedForward(module))
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove the hook from a module, and restore its forward.

    Args:
        module: The module, changed in place.
        recurse: Whether to do so below it too.

    Returns:
        The module.

    Examples:
        >>> from accel import cpu_offload
        >>> model = remove_hook_from_module(cpu_offload(model), recurse=True)
        >>> model.head.weight.device
        device(type='cpu')
    """
    if recurse:
        for submodule in list(module.modules()):
            remove_hook_from_module(submodule)
        return module
    hook = module.__dict__.get("_hf_hook")
    if hook is not None:
        hook.detach_hook(module)
        del module.__dict__["_hf_hook"]  # `delattr` of a compiled module would delete that of the module inside
    old = module.__dict__.pop("_old_forward", None)
    if old is not None:
        own = module.__dict__.pop("_accel_own_forward", None)
        # Libraries that replaced `forward` after the hook was added keep their forward.
        if isinstance(module.__dict__.get("forward"), HookedForward):
            del module.__dict__["forward"]
        if own is not None:
            object.__setattr__(module, "forward", own)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks from a module and everything below it.

    Args:
        module: The module, changed in place.

    Examples:
        >>> from accel import cpu_offload
        >>> model = cpu_offload(model)
        >>> remove_hook_from_submodules(model)
        >>> model.head.weight.device
        device(type='cpu')
    """
    remove_hook_from_module(module, recurse=True)
