"""Keyword-argument handlers give torch exactly what was changed."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch

from accel_core.errors import ConfigurationError
from accel_core.options.enums import DDPCommunicationHookType
from accel_core.plugins import handlers
from accel_testing import requires


@dataclass
class _Sample(handlers.KwargsHandler):
    number: int = 1
    words: list[str] = field(default_factory=list)


def test_only_changed_fields_become_kwargs() -> None:
    """`to_kwargs` holds what differs from its default or was added, `to_dict` all fields, both as copies."""
    sample = _Sample(words=["a"])
    assert sample.to_kwargs() == {"words": ["a"]}
    assert sample.to_dict() == {"number": 1, "words": ["a"]}
    assert sample.to_dict()["words"] is not sample.words
    sample.extra = 4  # type: ignore[attr-defined]
    assert sample.to_kwargs() == {"words": ["a"], "extra": 4}


@pytest.mark.parametrize(
    ("backend", "timeout"),
    [("nccl", timedelta(minutes=10)), ("gloo", timedelta(minutes=30)), (None, timedelta(minutes=30))],
)
def test_time_limit_follows_the_backend(backend: str | None, timeout: timedelta) -> None:
    """The time limit is torch's for the backend unless one is given."""
    assert handlers.InitProcessGroupKwargs(backend=backend).timeout == timeout
    given = timedelta(seconds=5)
    assert handlers.InitProcessGroupKwargs(backend=backend, timeout=given).timeout == given


def test_scaler_arguments_are_those_of_torch() -> None:
    """Every field is an argument of torch's scaler, with torch's default."""
    scaler = torch.amp.GradScaler("cpu", **handlers.GradScalerKwargs().to_dict())
    plain = torch.amp.GradScaler("cpu")
    assert scaler.state_dict() == plain.state_dict()


def test_ddp_leaves_the_hook_out_of_its_arguments() -> None:
    """The communication hook is registered later and is no argument of DistributedDataParallel."""
    kwargs = handlers.DistributedDataParallelKwargs(
        find_unused_parameters=True, comm_hook=DDPCommunicationHookType.FP16, comm_state_option={"x": 1}
    )
    assert kwargs.to_kwargs() == {"find_unused_parameters": True}
    assert "comm_hook" in kwargs.to_dict(ignore_keys=())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"comm_hook": "gzip"}, r"'gzip'.*fp16"),
        ({"comm_wrapper": "gzip"}, r"'gzip'.*fp16"),
        ({"comm_wrapper": DDPCommunicationHookType.POWER_SGD}, "wrapper"),
    ],
)
def test_unknown_hooks_are_refused(arguments: dict[str, Any], said: str) -> None:
    """A hook that is not known is an error, not silence, and only number formats may wrap another hook."""
    with pytest.raises(ConfigurationError, match=said):
        handlers.DistributedDataParallelKwargs(**arguments)


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.calls.append((state, hook))


@requires("numpy")  # torch's powerSGD imports it
@pytest.mark.parametrize("kind", [DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD])
def test_power_sgd_gets_its_state(kind: DDPCommunicationHookType) -> None:
    """The options of the state reach PowerSGDState."""
    recorder = _Recorder()
    kwargs = handlers.DistributedDataParallelKwargs(comm_hook=kind, comm_state_option={"matrix_approximation_rank": 3})
    kwargs.register_comm_hook(recorder)  # type: ignore[arg-type]
    ((state, hook),) = recorder.calls
    assert state.matrix_approximation_rank == 3
    assert hook.__name__.startswith(("powerSGD", "batched_powerSGD"))


def test_hooks_may_be_given_by_value() -> None:
    """A hook given as text is the same as the enumeration's member; without one the model is left alone."""
    recorder = _Recorder()
    handlers.DistributedDataParallelKwargs().register_comm_hook(recorder)  # type: ignore[arg-type]
    assert recorder.calls == []
    handlers.DistributedDataParallelKwargs(comm_hook="fp16").register_comm_hook(recorder)  # type: ignore[arg-type]
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    assert recorder.calls == [(None, default_hooks.fp16_compress_hook)]


def test_profiler_records_what_was_asked() -> None:
    """A built profiler records the named activity under the schedule; what torch cannot record is named."""
    built = handlers.ProfileKwargs(activities=["cpu"], schedule_option={"wait": 1, "warmup": 1, "active": 1}).build()
    assert built.activities == {torch.profiler.ProfilerActivity.CPU}
    assert built.schedule(0) is torch.profiler.ProfilerAction.NONE
    with pytest.raises(ConfigurationError, match=r"got 'abacus'\. Use one of .*cpu"):
        handlers.ProfileKwargs(activities=["abacus"]).build()  # type: ignore[list-item]
