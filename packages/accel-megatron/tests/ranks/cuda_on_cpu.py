"""A stand-in for `torch.cuda` that lets code written for CUDA alone compute on the CPU: real values, no streams."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CONSTRUCTORS = {
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


class _Stream:
    """A stream or an event, which has nothing to wait for."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self if name == "record_event" else True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave nothing behind."""


def _is_cuda(place: object) -> bool:
    return (isinstance(place, str | torch.device) and str(place).startswith("cuda")) or type(place) is int


class _OnCpu(TorchFunctionMode):
    """Puts on the CPU what asks for CUDA, and lets tensors say that they are there."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory") and args:
            return args[0]
        if name == "to":
            args = (args[0], *("cpu" if type(one) is not int and _is_cuda(one) else one for one in args[1:]))
        if name == "apply":  # a function of autograd, whose own code goes through here too
            with self:
                return func(*args, **kwargs)
        found = func(*args, **kwargs)
        if name == "type" and len(args) == 1 and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.", 1)
        return found


def stand_in() -> None:
    """Put the stand-in in the place of `torch.cuda`, for the rest of the process."""
    cuda: Any = torch.cuda
    nothing = {"empty_cache", "reset_peak_memory_stats", "set_device", "synchronize"}
    for name in nothing:
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("current_stream", "default_stream", "Stream", "Event"):
        setattr(cuda, name, _Stream)
    cuda.current_device = lambda: "cpu"
    cuda.device_count = lambda: 1
    cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    cuda.get_device_capability = lambda *args: (8, 0)
    facts = SimpleNamespace(major=8, minor=0, multi_processor_count=1, name="cpu", total_memory=1 << 33)
    cuda.get_device_properties = lambda *args: facts
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    for name, dtype in _CONSTRUCTORS.items():
        setattr(cuda, name, _constructor(dtype))
    generator = torch.Generator()  # CUDA's own, which the CPU's does not move
    cuda.default_generators = {"cpu": generator, None: generator}
    cuda.manual_seed = cuda.manual_seed_all = generator.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: generator.get_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: generator.set_state(state)
    cuda._lazy_call = lambda call, **kwargs: call()
    torch.nn.Module.cuda = lambda self, *args: self  # type: ignore[assignment]
    mode = _OnCpu()
    run_backward: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def inside(*args: Any, **kwargs: Any) -> Any:
        with mode:  # torch leaves it for the backward pass, in which layers may be computed again
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = inside  # type: ignore[attr-defined]
    mode.__enter__()


def _constructor(dtype: torch.dtype) -> Any:
    def make(*args: Any) -> torch.Tensor:
        if args and isinstance(args[0], list | tuple):
            return torch.tensor(*args, dtype=dtype)
        return torch.empty(*args, dtype=dtype)

    return make
