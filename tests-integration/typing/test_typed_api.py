"""The types of the public names, as two type checkers see them."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_testing import limits

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TYPED = HERE / "typed_api.py"
SOURCES = [str(path) for path in sorted((ROOT / "packages").glob("*/src"))]
WANTED = {number for number, line in enumerate(TYPED.read_text().splitlines(), 1) if line.endswith("# error")}


def check(*command: str, folder: Path) -> str:
    """Run a type checker and return what it printed."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = limits.run(command, cwd=folder, env=env, quiet=30)
    return done.stdout + done.stderr


def mypy(folder: Path) -> str:
    """Check with mypy under the project's own settings, from what the session `types` knows of the packages."""
    config = str(ROOT / "pyproject.toml")
    known = ROOT / ".nox" / "mypy"
    cache = str(known if known.is_dir() else folder / "cache")
    command = (sys.executable, "-m", "mypy", "--config-file", config, "--cache-dir", cache, str(TYPED))
    return check(*command, folder=ROOT)


def pyrefly(folder: Path) -> str:
    """Check with pyrefly, which knows nothing of the project."""
    paths = [word for source in SOURCES for word in ("--search-path", source)]
    program = str(Path(sys.executable).with_name("pyrefly"))
    interpreter = ("--python-interpreter-path", sys.executable)
    return check(program, "check", str(TYPED), *paths, *interpreter, "--output-format", "min-text", folder=folder)


@pytest.mark.parametrize("checker", [mypy, pyrefly])
def test_the_types_are_what_they_should_be(checker: Callable[[Path], str], tmp_path: Path) -> None:
    """The checker refuses exactly the lines that are marked, and every `assert_type` holds."""
    printed = checker(tmp_path)
    refused = {int(number) for number in re.findall(r"typed_api\.py:(\d+)", printed)}
    assert refused == WANTED, printed


def test_every_package_is_marked_as_typed() -> None:
    """Checkers read the types of a package only where `py.typed` lies in it."""
    unmarked = [str(path) for source in SOURCES for path in Path(source).iterdir() if not (path / "py.typed").is_file()]
    assert not unmarked
