"""The table of engines: what it says of what is installed, and that the code of the engines agrees with it."""

from pathlib import Path

import pytest
from packaging.version import Version

from accel_core.errors import MissingDependencyError
from accel_core.options.engines import engines


def _install(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_library_is_missing_old_or_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An engine says what is missing and the command that mends it, of a library that is absent and of an old one."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    engine = engines()["megatron"]
    missing = engine.presence()
    assert (missing.version, missing.problem) == (None, "megatron-core is not installed")
    assert missing.remedy == "pip install megatron-core transformers"
    with pytest.raises(
        MissingDependencyError, match=r"needs megatron-core 0\.16\.0 or newer; got none.*pip install meg"
    ):
        engine.require()
    _install(tmp_path, "deepspeed", "0.9.0")
    with pytest.raises(MissingDependencyError, match=r"got 0\.9\.0\. Run `pip install -U deepspeed ninja`"):
        engines()["deepspeed"].require()
    _install(tmp_path, "megatron-core", "0.16.1")
    assert Version(str(engine.presence().version)) >= Version(engine.oldest)
    assert not engine.presence().problem
    engine.require()
