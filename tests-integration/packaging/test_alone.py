"""What `nox -s alone` proves of a package before its tests run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_core.testing import limits

ALONE = Path(__file__).resolve().parents[2] / ".ci" / "alone.py"
FILES = {"__init__.py": "", "py.typed": "", "inner/__init__.py": "", "inner/deep.py": "import json\n"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Make the source of a package, and install it."""
    for place in ("source", "installed"):
        for name, text in FILES.items():
            path = tmp_path / place / "toy" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return tmp_path / "source" / "toy"


def prove(source: Path, *strangers: str) -> "subprocess.CompletedProcess[str]":
    """Run the script where the package is installed."""
    environment = os.environ | {"PYTHONPATH": str(source.parents[1] / "installed")}
    words = [sys.executable, str(ALONE), str(source), *strangers]
    return limits.run(words, env=environment)


def test_a_package_that_is_alone_and_whole_passes(source: Path) -> None:
    """Every module is imported; a program is not run."""
    for place in (source, source.parents[1] / "installed" / "toy"):
        (place / "__main__.py").write_text("raise SystemExit(3)\n")
    done = prove(source, "stranger")
    assert (done.returncode, done.stdout) == (0, "toy: 4 modules import; not importable: stranger\n"), done.stderr


def test_a_sibling_that_is_there_is_named(source: Path) -> None:
    """A sibling that can be imported makes all the rest worthless."""
    (source.parents[1] / "installed" / "stranger.py").touch()
    done = prove(source, "stranger")
    assert done.returncode == 1
    assert "yet these can be imported: stranger" in done.stderr


@pytest.mark.parametrize("name", ["py.typed", "inner/deep.py"])
def test_a_file_that_the_wheel_lacks_is_named(source: Path, name: str) -> None:
    """Code, and what is no code."""
    (source.parents[1] / "installed" / "toy" / name).unlink()
    done = prove(source)
    assert done.returncode == 1
    assert f"lacks files that lie in {source}: {name}" in done.stderr


def test_a_module_that_needs_what_is_not_declared_fails(source: Path) -> None:
    """However deep it lies."""
    (source.parents[1] / "installed" / "toy" / "inner" / "deep.py").write_text("import no_such_library\n")
    done = prove(source)
    assert done.returncode == 1
    assert "No module named 'no_such_library'" in done.stderr
