"""Plugins of loading, project, accumulation and compilation fill and check their fields."""

import pytest

from accel_core.errors import ConfigurationError
from accel_core.options.enums import DynamoBackend
from accel_core.plugins.accumulation import GradientAccumulationPlugin
from accel_core.plugins.compilation import TorchDynamoPlugin
from accel_core.plugins.loading import DataLoaderConfiguration
from accel_core.plugins.project import ProjectConfiguration


def test_project_fills_the_logging_folder_once() -> None:
    """The logging folder follows the project's folder until it is set."""
    project = ProjectConfiguration()
    project.set_directories("run")
    assert (project.project_dir, project.logging_dir) == ("run", "run")
    project.set_directories("other")
    assert (project.project_dir, project.logging_dir) == ("other", "run")
    assert ProjectConfiguration("run", logging_dir="logs").logging_dir == "logs"


def test_positions_are_restored_as_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument is stronger than the variable, which is stronger than the default of the process; it is yes."""
    default, yes, no = (DataLoaderConfiguration(restore_position=choice) for choice in (None, True, False))
    assert default.restores_position
    DataLoaderConfiguration.default_restore_position = staticmethod(lambda: False)
    assert (default.restores_position, yes.restores_position) == (False, True)
    monkeypatch.setenv("ACCEL_RESTORE_POSITION", "1")
    assert (default.restores_position, no.restores_position) == (True, False)
    monkeypatch.setenv("ACCEL_RESTORE_POSITION", "perhaps")
    with pytest.raises(ConfigurationError, match="ACCEL_RESTORE_POSITION"):
        assert default.restores_position


@pytest.mark.parametrize(
    ("kind", "arguments", "said"),
    [
        *((GradientAccumulationPlugin, {"num_steps": steps}, "num_steps") for steps in (0, -1, "two", 1.5)),
        (GradientAccumulationPlugin, {"short_window": "half"}, r"short_window is.*; got 'half'.*actual.*full"),
        (DataLoaderConfiguration, {"uneven_end": "wait"}, r"'wait'.*drop.*repeat.*empty"),
        (TorchDynamoPlugin, {"backend": "gcc"}, r"'gcc'.*inductor"),
    ],
)
def test_unknown_choices_and_broken_windows_are_refused(kind: type, arguments: dict[str, object], said: str) -> None:
    """A window of no, negative or broken length, and words that are no choice, are refused with those that are."""
    with pytest.raises(ConfigurationError, match=said):
        kind(**arguments)
    assert DataLoaderConfiguration().uneven_end == "drop"


def test_compilation_defaults_to_none_at_all() -> None:
    """Without arguments and environment nothing is compiled and nothing differs."""
    plugin = TorchDynamoPlugin()
    assert plugin.backend is DynamoBackend.NO
    assert (plugin.mode, plugin.fullgraph, plugin.dynamic) == ("default", False, None)
    assert plugin.use_regional_compilation is False
    assert plugin.to_kwargs() == {}


def test_compilation_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ACCELERATE_DYNAMO_* variable fills its field, and an argument is stronger."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "1")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "true")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "yes")
    plugin = TorchDynamoPlugin(dynamic=False)
    assert plugin.backend is DynamoBackend.EAGER
    assert (plugin.mode, plugin.fullgraph, plugin.dynamic) == ("reduce-overhead", True, False)
    assert plugin.use_regional_compilation is True
    assert plugin.to_kwargs() == {"backend": "eager", "mode": "reduce-overhead", "fullgraph": True, "dynamic": False}


@pytest.mark.parametrize("name", ["inductor", "INDUCTOR", DynamoBackend.INDUCTOR])
def test_compilers_are_known_by_any_spelling(name: str) -> None:
    """A compiler is accepted by name in any case, and torch gets its lower-case name."""
    plugin = TorchDynamoPlugin(backend=name)  # type: ignore[arg-type]
    assert plugin.backend is DynamoBackend.INDUCTOR
    assert plugin.to_kwargs() == {"backend": "inductor"}
    assert plugin.to_dict()["backend"] == "inductor"
