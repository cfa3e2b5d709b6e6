"""Choosing a strategy."""

import pytest

from accel_core.errors import ConfigurationError
from accel_core.host.environ import patch_environment
from accel_core.options.enums import DistributedType
from accel_core.plugins.handlers import DistributedDataParallelKwargs, KwargsHandler
from accel_core.strategies import registry
from accel_core.strategies.ddp import DataParallelStrategy
from accel_core.strategies.registry import Request, choose, register_strategy
from accel_core.strategies.single import SingleStrategy


class Settings(KwargsHandler):
    """A third party's plugin."""


class Foreign(SingleStrategy):
    """A third party's strategy, chosen by its plugin."""

    name = "foreign"
    plugin_type = Settings

    def label(self) -> DistributedType:
        """Return a label."""
        return DistributedType.NO


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget strategies that a test registers."""
    monkeypatch.setattr(registry, "_registered", {})


@pytest.mark.parametrize(("processes", "strategy"), [(1, SingleStrategy), (2, DataParallelStrategy)])
def test_plain_runs(processes: int, strategy: type) -> None:
    """One process trains alone, several data parallel, which is no engine, with arguments of DDP or without."""
    settings = DistributedDataParallelKwargs(bucket_cap_mb=3)
    for given in ((), (settings,)):
        choice = choose(Request(processes, given))
        assert (choice.strategy, choice.is_engine, choice.flag) == (strategy, False, "")
    assert processes == 1 or choice.plugins == (settings,)


def test_unknown_name_lists_what_is_installed() -> None:
    """ACCELERATE_STRATEGY names a third party's strategy or fails."""
    register_strategy(Foreign)
    with (
        patch_environment(accelerate_strategy="nobody"),
        pytest.raises(ConfigurationError, match=r"'nobody'.*\['foreign'\]"),
    ):
        choose(Request(1))


def test_third_party_is_chosen_by_plugin_or_name() -> None:
    """Its plugin type claims a run and reaches it; its name does so without a plugin."""
    register_strategy(Foreign)
    settings = Settings()
    choice = choose(Request(2, (settings, DistributedDataParallelKwargs())))
    assert (choice.strategy, choice.plugins, choice.is_engine) == (Foreign, (settings,), True)
    with patch_environment(ACCELERATE_STRATEGY="foreign"):
        assert choose(Request(1)).strategy is Foreign
    assert choose(Request(1)).strategy is SingleStrategy


def test_two_claimants_of_one_plugin_are_refused() -> None:
    """The error names both and says how to choose."""

    class Other(Foreign):
        name = "other"

    register_strategy(Foreign)
    register_strategy(Other)
    with pytest.raises(ConfigurationError, match=r"\['foreign', 'other'\].*ACCELERATE_STRATEGY"):
        choose(Request(1, (Settings(),)))


def test_a_strategy_on_ddp_gets_its_plugin_and_those_of_ddp() -> None:
    """Arguments of DDP reach a subclass that has a plugin of its own, behind that plugin."""

    class Plugin(KwargsHandler):
        """A plugin of its own."""

    class OnDdp(DataParallelStrategy):
        """A subclass."""

        name = "on-ddp"
        plugin_type = Plugin

    arguments, own = DistributedDataParallelKwargs(static_graph=True), Plugin()
    found = registry._plugins_for(OnDdp, (arguments, own, object()))
    assert found == (own, arguments)
