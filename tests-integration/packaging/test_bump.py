"""A package's version moves alone: what stands on another package does not notice."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_testing import limits

ROOT = Path(__file__).resolve().parents[2]
RELEASE = ROOT / ".ci" / "release.py"
TOY = """
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "toy"
version = "1.0"
dependencies = ["accel-bigmodel=={pin}"]

[tool.hatch.build.targets.wheel]
packages = ["toy"]
"""
USE = """
import torch
from accel_bigmodel import init_empty_weights

def blank() -> torch.device:
    with init_empty_weights():
        return torch.nn.Linear(8, 8).weight.device
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Copy the packages, with something to release in each changelog."""
    for folder in (ROOT / "packages").iterdir():
        ignore = shutil.ignore_patterns("__pycache__", "tests", "dist")
        shutil.copytree(folder, tmp_path / "repository" / "packages" / folder.name, ignore=ignore)
    for changelog in (tmp_path / "repository").glob("packages/*/CHANGELOG.md"):
        title = changelog.read_text().partition("\n")[0]
        changelog.write_text(f"{title}\n\n## Unreleased\n\n- Something changed.\n\n## 0.0.1\n\n- Long ago.\n")
    return tmp_path / "repository"


def release(repository: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run the release script on a copy of the repository."""
    command = [sys.executable, str(RELEASE), *words, "--root", str(repository)]
    return limits.run(command)


def contents(repository: Path) -> dict[Path, str]:
    """Return the text of every file of the repository."""
    return {path: path.read_text() for path in repository.rglob("*") if path.suffix in (".py", ".md", ".toml")}


def version(repository: Path, name: str) -> str:
    """Read the line that holds a package's version."""
    return next((repository / "packages" / name / "src").glob("*/_version.py")).read_text()


def test_a_patch_touches_the_package_alone(repository: Path) -> None:
    """The version file and the changelog of the one package change, and nothing else anywhere."""
    before = contents(repository)
    done = release(repository, "accel-launch", "patch")
    assert done.returncode == 0, done.stderr
    changed = {path for path, text in contents(repository).items() if before[path] != text}
    own = repository / "packages" / "accel-launch"
    assert changed == {own / "CHANGELOG.md", own / "src" / "accel_launch" / "_version.py"}
    assert '__version__ = "0.1.1"' in version(repository, "accel-launch")
    changelog = (own / "CHANGELOG.md").read_text()
    assert changelog.index("## 0.1.1 – ") < changelog.index("- Something changed.") < changelog.index("## 0.0.1")
    assert "Unreleased" not in changelog


def test_a_first_release_keeps_its_version(repository: Path) -> None:
    """A package that was never released is released as the version that it has, once."""
    changelog = repository / "packages" / "accel-quant" / "CHANGELOG.md"
    changelog.write_text("# Changelog of accel-quant\n\n## Unreleased\n\nFirst release.\n\n- Something.\n")
    done = release(repository, "accel-quant", "0.1.0")
    assert done.returncode == 0, done.stderr
    assert '__version__ = "0.1.0"' in version(repository, "accel-quant")
    assert "## 0.1.0 – " in changelog.read_text()
    assert release(repository, "accel-quant", "0.1.0").returncode == 2


def test_a_breaking_version_widens_the_ranges_of_dependants(repository: Path) -> None:
    """Dependants take the new version in, note it as unreleased, and keep their own version."""
    versions = {name: version(repository, name) for name in ("accel-all", "accel-quant")}
    done = release(repository, "accel-bigmodel", "minor")
    assert done.returncode == 0, done.stderr
    assert '__version__ = "0.2.0"' in version(repository, "accel-bigmodel")
    for name, old in versions.items():
        folder = repository / "packages" / name
        assert '"accel-bigmodel>=0.1,<0.3"' in (folder / "pyproject.toml").read_text()
        assert "Works with accel-bigmodel 0.2.0" in (folder / "CHANGELOG.md").read_text()
        assert version(repository, name) == old
    assert "accel-bigmodel" not in (repository / "packages" / "accel-trackers" / "CHANGELOG.md").read_text()


def test_the_drop_in_keeps_the_version_that_it_stands_for(repository: Path) -> None:
    """Only the part behind `+accel.` moves."""
    assert release(repository, "accelerate", "minor").returncode == 0
    assert '"1.15.0+accel.0.2.0"' in version(repository, "accel-compat")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("accel-cor", "patch"), "There is no package 'accel-cor'"),
        (("accel-core", "0.0.9"), "0.0.9 is not above the present version"),
        (("accel-core", "soon"), "'soon' is not a version"),
    ],
)
def test_a_wrong_release_is_refused_and_changes_nothing(repository: Path, words: tuple[str, str], message: str) -> None:
    """The message says what is wrong and what to write instead; no file is touched."""
    before = contents(repository)
    done = release(repository, *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert contents(repository) == before


def test_a_package_that_did_not_change_is_not_released(repository: Path) -> None:
    """Without an entry under "Unreleased" there is nothing to release."""
    changelog = repository / "packages" / "accel-core" / "CHANGELOG.md"
    changelog.write_text("# Changelog of accel-core\n\n## 0.0.1\n\n- Long ago.\n")
    before = contents(repository)
    done = release(repository, "accel-core", "minor")
    assert done.returncode == 2
    assert "nothing under '## Unreleased'" in done.stderr
    assert contents(repository) == before


@pytest.mark.full("packages from source")
def test_a_pinned_bigmodel_outlives_a_bump_of_launch(environment: Any, repository: Path, tmp_path: Path) -> None:
    """A toy library that wants one exact accel-bigmodel works before and after accel-launch got a breaking version."""
    folders = [repository / "packages" / name for name in ("accel-core", "accel-bigmodel", "accel-launch")]
    toy = tmp_path / "toy"
    (toy / "toy").mkdir(parents=True)
    pin = version(repository, "accel-bigmodel").split('"')[-2]
    (toy / "pyproject.toml").write_text(TOY.format(pin=pin))
    (toy / "toy" / "__init__.py").write_text(USE)
    environment.install("--no-build-isolation", *folders, toy)
    ask = "import toy, accel_launch; print(toy.blank(), accel_launch.__version__)"
    assert environment.python(ask).stdout.split() == ["meta", "0.1.0"]
    assert release(repository, "accel-launch", "minor").returncode == 0
    environment.install("--no-build-isolation", "--upgrade", folders[0], folders[2], toy)
    assert environment.python(ask).stdout.split() == ["meta", "0.2.0"]
    conflicts = environment.run("python", "-m", "pip", "check", check=False).stdout
    assert not re.search("accel|toy", conflicts), conflicts
