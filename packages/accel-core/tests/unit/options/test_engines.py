"""The table of engines: what it says of what is installed, and that the code of the engines agrees with it."""

from pathlib import Path

import pytest
from packaging.version import Version

from accel_core.errors import MissingDependencyError
from accel_core.options.engines import ENGINES, named
from accel_core.strategies import registry


def _install(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_library_is_missing_old_or_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An engine says what is missing and the command that mends it, of a library that is absent and of an old one."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    engine = named("megatron")
    missing = engine.presence()
    assert (missing.version, missing.problem) == (None, "megatron-core is not installed")
    assert missing.remedy == "pip install megatron-core transformers"
    with pytest.raises(
        MissingDependencyError, match=r"needs megatron-core 0\.16\.0 or newer; got none.*pip install meg"
    ):
        engine.require()
    _install(tmp_path, "deepspeed", "0.9.0")
    with pytest.raises(MissingDependencyError, match=r"got 0\.9\.0\. Run `pip install -U deepspeed ninja`"):
        named("deepspeed").require()
    _install(tmp_path, "megatron-core", "0.16.1")
    assert Version(str(engine.presence().version)) >= Version(engine.oldest)
    assert not engine.presence().problem
    engine.require()


def test_names_are_unique_and_known() -> None:
    """Each engine has a word of its own; a word of none is a KeyError."""
    assert len({engine.name for engine in ENGINES}) == len(ENGINES)
    assert all(named(engine.name) is engine for engine in ENGINES)
    with pytest.raises(KeyError, match="horovod"):
        named("horovod")


def test_the_registry_of_strategies_agrees() -> None:
    """Every variable that claims a run is that of an engine in the table, and the other way round."""
    claiming = {row.flag for row in registry.ORDER if row.flag}
    assert claiming == {engine.variable for engine in ENGINES if engine.variable}
