"""What the session `isolated` proves of a package before its tests run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_testing import limits

ALONE = Path(__file__).resolve().parents[2] / ".ci" / "alone.py"
FILES = {"__init__.py": "", "py.typed": "", "inner/__init__.py": "", "inner/deep.py": "import json\n"}
LIBRARY = {"deep_library": "", "deeper_library": "deep-library", "foreign_library": "", "toy": "deeper-library"}
"""Distributions that are installed, and what each declares."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Make the source of a package, and install it."""
    for place in ("source", "installed"):
        for name, text in FILES.items():
            path = tmp_path / place / "toy" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for name, needs in LIBRARY.items():
        facts = tmp_path / "installed" / f"{name}-1.0.dist-info"
        facts.mkdir()
        required = f"Requires-Dist: {needs}\n" if needs else ""
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{required}")
        (facts / "top_level.txt").write_text(f"{name}\n")
        (tmp_path / "installed" / name).mkdir(exist_ok=True)
    return tmp_path / "source" / "toy"


def prove(source: Path, *strangers: str, status: int = 0) -> "subprocess.CompletedProcess[str]":
    """Run the script, which ends with a status, where the package is installed."""
    environment = os.environ | {"PYTHONPATH": str(source.parents[1] / "installed")}
    words = [sys.executable, str(ALONE), str(source), "toy", *strangers]
    done = limits.run(words, env=environment)
    assert done.returncode == status, done.stderr
    return done


def test_a_package_that_is_alone_and_whole_passes(source: Path) -> None:
    """Every module is imported; a program is not run."""
    for place in (source, source.parents[1] / "installed" / "toy"):
        (place / "__main__.py").write_text("raise SystemExit(3)\n")
    assert prove(source, "stranger").stdout == "toy: 4 modules import; not importable: stranger\n"


def test_a_sibling_that_is_there_is_named(source: Path) -> None:
    """A sibling that can be imported makes all the rest worthless."""
    (source.parents[1] / "installed" / "stranger.py").touch()
    assert "yet these can be imported: stranger" in prove(source, "stranger", status=1).stderr


@pytest.mark.parametrize("name", ["py.typed", "inner/deep.py"])
def test_a_file_that_the_wheel_lacks_is_named(source: Path, name: str) -> None:
    """Code, and what is no code."""
    (source.parents[1] / "installed" / "toy" / name).unlink()
    assert f"lacks files that lie in {source}: {name}" in prove(source, status=1).stderr


@pytest.mark.parametrize("library", ["no_such_library", "foreign_library", "pytest"])
def test_a_module_that_needs_what_is_not_declared_fails(source: Path, library: str) -> None:
    """However deep it lies, and whether or not another package brought the library."""
    (source.parents[1] / "installed" / "toy" / "inner" / "deep.py").write_text(f"import {library}\n")
    assert f"No module named '{library}'" in prove(source, status=1).stderr


def test_a_module_finds_what_a_library_of_its_own_needs(source: Path) -> None:
    """What is declared may itself declare more."""
    deep = source.parents[1] / "installed" / "toy" / "inner" / "deep.py"
    deep.write_text("import deep_library, deeper_library\n")
    prove(source)


@pytest.mark.parametrize(("owner", "seen"), [("deep_library", True), ("foreign_library", False)])
def test_what_others_offer_is_not_found(source: Path, owner: str, seen: bool) -> None:
    """Entry points are read from the files on the path too, and only those of what is declared are there."""
    installed = source.parents[1] / "installed"
    (installed / f"{owner}-1.0.dist-info" / "entry_points.txt").write_text(f"[group]\npoint = {owner}\n")
    search = "[place for place in sys.path for _ in pathlib.Path(place).glob('*.dist-info/entry_points.txt')]"
    (installed / "toy" / "inner" / "deep.py").write_text(f"import pathlib, sys\nassert bool({search}) is {seen}\n")
    prove(source)
