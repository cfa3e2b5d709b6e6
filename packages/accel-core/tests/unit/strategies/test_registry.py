"""Choosing a strategy."""

import pytest

from accel_core.errors import ConfigurationError, EngineUnavailableError
from accel_core.host.environ import patch_environment
from accel_core.strategies.ddp import DataParallelStrategy
from accel_core.strategies.registry import Request, choose
from accel_core.strategies.single import SingleStrategy


@pytest.mark.parametrize(("processes", "strategy"), [(1, SingleStrategy), (2, DataParallelStrategy)])
def test_plain_runs(processes: int, strategy: type) -> None:
    """One process trains alone, several train data parallel."""
    assert choose(Request(processes)) is strategy


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp", "megatron"])
def test_engine_asked_for_by_plugin_is_never_replaced(engine: str) -> None:
    """An engine that is not built is an error, on one process as on many."""
    for processes in (1, 2):
        with pytest.raises(EngineUnavailableError, match=f"{engine}.*Remove the plugin"):
            choose(Request(processes, **{engine: object()}))


@pytest.mark.parametrize("variable", ["USE_DEEPSPEED", "USE_FSDP", "USE_MEGATRON_LM"])
def test_engine_asked_for_by_environment_is_never_replaced(variable: str) -> None:
    """The same holds for the variables that a launcher sets."""
    with patch_environment(**{f"ACCELERATE_{variable}": "true"}), pytest.raises(EngineUnavailableError):
        choose(Request(2))


def test_unknown_name_lists_what_is_installed() -> None:
    """ACCELERATE_STRATEGY names a third party's strategy or fails."""
    with patch_environment(accelerate_strategy="nobody"), pytest.raises(ConfigurationError, match="'nobody'"):
        choose(Request(1))
