"""Wheels and sdists of all packages, and environments that hold some of them."""

import os
import shutil
import subprocess
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from accel_testing import limits

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {folder.name: folder for folder in sorted((ROOT / "packages").iterdir()) if folder.is_dir()}
OWN = ("accel", "__editable__", "_editable_impl", "distutils-precedence")


@dataclass(frozen=True)
class Installed:
    """An environment with some packages of this repository; third-party libraries come from the running one."""

    folder: Path

    def run(self, *words: object, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run one of its programs and return what it printed."""
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        program, *arguments = map(str, words)
        done = limits.run([str(self.folder / "bin" / program), *arguments], cwd=self.folder, env=env, quiet=30)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def python(self, code: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run Python code in it, away from the repository."""
        return self.run("python", "-I", "-c", code, check=check)

    def install(self, *what: object, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Install files and folders with pip and no index, so that nothing can come from a stranger."""
        return self.run("python", "-m", "pip", "install", "-q", "--no-index", *what, check=check)


@pytest.fixture(scope="session")
def borrowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder that shows the running environment's libraries and none of this repository's packages."""
    folder = tmp_path_factory.mktemp("borrowed")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(OWN) and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture
def environment(tmp_path: Path, borrowed: Path) -> Installed:
    """Make an environment that holds none of this repository's packages yet."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    purelib = next((folder / "lib").glob("python*")) / "site-packages"
    (purelib / "borrowed.pth").write_text(f"{borrowed}\n")
    return Installed(folder)


def build(source: Path, target: Path) -> tuple[Path, Path]:
    """Build a package as `hatch build` does and return its wheel and its sdist."""
    hatch = os.environ.get("ACCEL_HATCH") or shutil.which("hatch")
    if hatch is None:
        pytest.skip("needs hatch on PATH, or its path in ACCEL_HATCH")
    backend = Path(hatch).with_name("hatchling")  # which hatch calls; it begins six times as fast
    quick = backend.exists() and source.name != "accel-core"
    command = [backend, "build", "-d", target] if quick else [hatch, "build", target]
    limits.run([*map(str, command)], cwd=source, quiet=30, check=True)
    return next(target.glob("*.whl")), next(target.glob("*.tar.gz"))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Build every package from a copy of its folder: its wheel and its sdist, by the folder's name."""
    target = tmp_path_factory.mktemp("dist")
    sources = tmp_path_factory.mktemp("sources")
    result = {}
    for name, folder in PACKAGES.items():
        shutil.copytree(folder, sources / name, ignore=shutil.ignore_patterns("__pycache__", "dist"))
        result[name] = build(sources / name, target / name)
    return result


@pytest.fixture(scope="session")
def wheels(built: dict[str, tuple[Path, Path]]) -> dict[str, Path]:
    """Return the wheel of every package by the name of its folder."""
    return {name: wheel for name, (wheel, _) in built.items()}
