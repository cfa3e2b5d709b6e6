"""Hooks around `forward`, and how they are put on a module and taken off again."""

import functools
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

__all__ = [
    "ModelHook",
    "SequentialHook",
    "add_hook_to_module",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]


class ModelHook:
    """Callbacks before and after a module's forward; they see its keyword arguments, and may change what they see.

    Attributes:
        no_grad: Whether the forward runs under `torch.no_grad()`.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Act when the hook is put on a module.

        Args:
            module: The module.

        Returns:
            The module.
        """
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Act before the forward.

        Args:
            module: The module whose forward follows.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            The arguments to call the forward with.
        """
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
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
        """Act when the forward, or a hook before it, raised: `post_forward` will not be called.

        Args:
            module: The module whose forward failed.
        """


class SequentialHook(ModelHook):
    """Several hooks as one: each event goes to all of them, in order.

    Args:
        hooks: The hooks.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Initialise every hook."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass the arguments through every hook."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Pass the output through every hook."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Detach every hook."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module

    @property
    def keeps_weights_while_running(self) -> bool:
        """Whether some hook's weights stay until the last of several overlapping forwards is done."""
        return any(getattr(hook, "keeps_weights_while_running", False) for hook in self.hooks)

    def enter_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass the arguments of a forward that follows through every hook."""
        for hook in self.hooks:
            args, kwargs = getattr(hook, "enter_forward", hook.pre_forward)(module, *args, **kwargs)
        return args, kwargs

    def move_inputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass the arguments of a forward inside the forward through every hook; weights are there already."""
        for hook in self.hooks:
            if getattr(hook, "keeps_weights_while_running", False):
                args, kwargs = cast(Any, hook).move_inputs(module, args, kwargs)
            else:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def move_output(self, module: nn.Module, output: Any) -> Any:
        """Pass the output of a forward inside the forward through every hook; weights stay."""
        for hook in self.hooks:
            if getattr(hook, "keeps_weights_while_running", False):
                output = cast(Any, hook).move_output(module, output)
            else:
                output = hook.post_forward(module, output)
        return output

    def abort_forward(self, module: nn.Module) -> None:
        """Tell every hook."""
        for hook in self.hooks:
            _abort(hook, module)


def _abort(hook: Any, module: nn.Module) -> None:
    """Tell a hook of a failed forward; hooks of other libraries need not know the event."""
    abort = getattr(hook, "abort_forward", None)
    if abort is not None:
        abort(module)


class HookedForward:
    """The forward of a module that carries a hook. It can be copied and pickled with the module.

    Args:
        module: The module.
        forward: The forward to run between the hook's events.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self.module = module
        self.depth = 0

    def of(self, module: nn.Module) -> "HookedForward":
        """Give the forward of a module that was copied from this one's, with its hook.

        Args:
            module: The copy.

        Returns:
            Its forward.
        """
        return HookedForward(module, module._old_forward)  # type: ignore[arg-type]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the hook and the forward; a compiled graph is left for the hook and entered again for the forward."""
        if "torch._dynamo" in sys.modules:
            runner = _runner if _runner is not None else _make_runner()
            return runner(self, args, kwargs)
        return self.run(args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the hook and the forward.

        Args:
            args: Positional arguments of the forward.
            kwargs: Keyword arguments of the forward.

        Returns:
            What the hook makes of the forward's output.
        """
        module = self.module
        hook: Any = module._hf_hook
        return self.surround(hook, getattr(hook, "enter_forward", hook.pre_forward), hook.post_forward, args, kwargs)

    def surround(
        self,
        hook: Any,
        before: Callable[..., Any],
        after: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the forward between two events of its hook.

        A forward that is entered again before it returns (recursion, another thread) finds its weights there: only
        the last one to leave sends them away.
        """
        module: Any = self.module
        counts = getattr(hook, "keeps_weights_while_running", False)
        self.depth += 1
        try:
            if counts and self.depth > 1:
                args, kwargs = hook.move_inputs(module, args, kwargs)
            else:
                args, kwargs = before(module, *args, **kwargs)
            if hook.no_grad:
                with torch.no_grad():
                    output = module._old_forward(*args, **kwargs)
            else:
                output = module._old_forward(*args, **kwargs)
            if counts and self.depth > 1:
                return hook.move_output(module, output)
            return after(module, output)
        except BaseException:
            if self.depth == 1:
                _abort(hook, module)
            raise
        finally:
            self.depth -= 1


def _run_eagerly(forward: HookedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run with the hook's own work outside of any graph that torch.compile is recording."""
    hook: Any = forward.module._hf_hook
    disable = cast(Any, torch.compiler.disable)
    before, after = disable(getattr(hook, "enter_forward", hook.pre_forward)), disable(hook.post_forward)
    return forward.surround(hook, before, after, args, kwargs)


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
    """
    present = getattr(module, "_hf_hook", None)
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
    object.__setattr__(module, "_old_forward", forward)
    object.__setattr__(module, "_hf_hook", hook)
    object.__setattr__(module, "_accel_own_forward", own)
    object.__setattr__(module, "forward", HookedForward(module, forward))
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Take the hook off a module, and give it back the forward it had.

    Args:
        module: The module, changed in place.
        recurse: Whether to do so below it too.

    Returns:
        The module.
    """
    if recurse:
        for submodule in list(module.modules()):
            remove_hook_from_module(submodule)
        return module
    hook = module.__dict__.get("_hf_hook")
    if hook is not None:
        hook.detach_hook(module)
        delattr(module, "_hf_hook")
    old = module.__dict__.pop("_old_forward", None)
    if old is not None:
        own = module.__dict__.pop("_accel_own_forward", None)
        # Libraries that replaced `forward` themselves after the hook came keep their forward.
        if isinstance(module.__dict__.get("forward"), HookedForward):
            del module.__dict__["forward"]
        if own is not None:
            object.__setattr__(module, "forward", own)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take the hooks off a module and everything below it.

    Args:
        module: The module, changed in place.
    """
    remove_hook_from_module(module, recurse=True)
