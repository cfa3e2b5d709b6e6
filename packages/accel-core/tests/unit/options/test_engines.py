"""The table of engines: what it says of what is installed, and that the code of the engines agrees with it."""

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from accel_core.accelerator import Accelerator
from accel_core.checkpoint import names
from accel_core.checkpoint.format import Source
from accel_core.checkpoint.formats import recognise
from accel_core.checkpoint.plain import PLAIN
from accel_core.errors import MissingDependencyError
from accel_core.host.environ import patch_environment
from accel_core.options import engines as table
from accel_core.options.engines import PUBLIC, Engine, bring
from accel_core.plugins.parallelism import ParallelismConfig
from accel_core.process import world
from accel_core.state import PartialState
from accel_core.strategies import registry


def _install(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_library_is_missing_old_or_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An engine says what is missing and the command that mends it, of a library that is absent and of an old one."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    engine = Engine("megatron", "Megatron-LM", "megatron-core", "0.16.0", "transformers")
    missing = engine.presence()
    assert (missing.version, missing.problem) == (None, "megatron-core is not installed")
    assert missing.remedy == "pip install megatron-core transformers"
    with pytest.raises(
        MissingDependencyError, match=r"needs megatron-core 0\.16\.0 or newer; got none.*pip install meg"
    ):
        engine.require()
    _install(tmp_path, "deepspeed", "0.9.0")
    with pytest.raises(MissingDependencyError, match=r"got 0\.9\.0\. Run `pip install -U deepspeed ninja`"):
        Engine("deepspeed", "DeepSpeed", "deepspeed", "0.18.2", "ninja").require()
    _install(tmp_path, "megatron-core", "0.16.1")
    assert Version(str(engine.presence().version)) >= Version(engine.oldest)
    assert not engine.presence().problem
    engine.require()


@pytest.fixture
def core_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let no package announce an engine, as where accel-core is installed alone."""
    alone = {engine.name: engine for engine in table.BUILT_IN}
    for module in (table, registry):
        monkeypatch.setattr(module, "engines", lambda: alone)
    return tmp_path


@pytest.mark.usefixtures("fresh_state", "core_alone")
@pytest.mark.parametrize("known", [known for known in PUBLIC if known.files], ids=lambda known: known.word)
def test_an_engine_without_its_package_is_named(known: table.Public) -> None:
    """A plugin or a variable of an engine that is not installed is one error with the package, and leaves no state."""
    told = rf"{known.package} is not installed.*Run `pip install {known.package}`"
    with pytest.raises(MissingDependencyError, match=told):
        Accelerator(**{f"{known.word}_plugin": object()})
    with patch_environment(**{f"ACCELERATE_USE_{known.word}": "true"}):
        for ask in (Accelerator, PartialState):
            with pytest.raises(MissingDependencyError, match=told):
                ask()
    assert PartialState._shared_state == {}
    assert world.current() is None


@pytest.mark.usefixtures("fresh_state", "core_alone")
def test_axes_without_their_package_are_named() -> None:
    """Axes that ranks share are an engine too; one process, and several that copy the model, need no package."""
    with pytest.raises(MissingDependencyError, match=r"accel-parallel is not installed.*axes along which"):
        registry.choose(registry.Request(2, parallelism=ParallelismConfig(tp_size=2)))
    assert [registry.choose(registry.Request(size)).strategy.name for size in (1, 2)] == ["single", "ddp"]


def test_a_checkpoint_of_an_engine_without_its_package_is_named(core_alone: Path) -> None:
    """A folder that only the engine writes says which package reads it."""
    (core_alone / "pytorch_model_megatron").mkdir()
    (core_alone / "pytorch_model_megatron" / "common.pt").touch()
    assert names.found_in(core_alone) == ["pytorch_model_megatron/common.pt"]
    with pytest.raises(MissingDependencyError, match=r"accel-megatron is not installed.*checkpoint"):
        recognise(Source(core_alone, None, 1, {}, {}), PLAIN)


@pytest.mark.usefixtures("core_alone")
def test_old_paths_name_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin's old import path, and a module of the package, say what to install; other names are no attributes."""
    monkeypatch.setattr(table, "has_module", lambda name: False)
    with pytest.raises(MissingDependencyError, match="pip install accel-megatron"):
        from accel_core.plugins.megatron import MegatronLMPlugin  # noqa: F401
    with pytest.raises(MissingDependencyError, match="pip install accel-deepspeed"):
        bring("accel_deepspeed.plugin")


def test_a_plain_run_looks_for_no_packages() -> None:
    """An Accelerator on one process, without plugin and variable, reads the metadata of no distribution."""
    code = (
        "from accel_core.accelerator import Accelerator; Accelerator(cpu=True)\n"
        "from accel_core.options.engines import engines; print(engines.cache_info().misses)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
