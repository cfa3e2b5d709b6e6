"""`hatch build` in each package's folder gives a wheel and an sdist that install and import."""

import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

MODULES = {
    "accel-all": "accel",
    "accel-bigmodel": "accel_bigmodel",
    "accel-compat": "accelerate",
    "accel-core": "accel_core",
    "accel-deepspeed": "accel_deepspeed",
    "accel-launch": "accel_launch",
    "accel-megatron": "accel_megatron",
    "accel-parallel": "accel_parallel",
    "accel-plan": "accel_plan",
    "accel-quant": "accel_quant",
    "accel-testing": "accel_testing",
    "accel-torchft": "accel_torchft",
    "accel-trackers": "accel_trackers",
    "accel-verify": "accel_verify",
}
Built = dict[str, tuple[Path, Path]]


def test_every_package_is_known(built: Built) -> None:
    """A package that joins the repository has to join these tests."""
    assert built.keys() == MODULES.keys()


@pytest.mark.parametrize("name", MODULES)
def test_files_hold_the_package_and_nothing_else(built: Built, name: str) -> None:
    """A wheel has one top-level package, its type marker and its license, no tests; an sdist what it is built from."""
    wheel, sdist = built[name]
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
    tops = {file.split("/")[0] for file in files if ".dist-info/" not in file}
    assert tops == {MODULES[name]}
    assert f"{MODULES[name]}/py.typed" in files
    assert any(file.endswith("licenses/LICENSE") for file in files)
    assert not [file for file in files if "/tests/" in file or file.endswith(".pyc")]
    with tarfile.open(sdist) as archive:
        sources = {member.split("/", 1)[1] for member in archive.getnames() if "/" in member}
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", f"src/{MODULES[name]}/__init__.py"} <= sources


@pytest.mark.parametrize("kind", ["wheel", pytest.param("sdist", marks=pytest.mark.full("packages from source"))])
def test_all_install_together_and_import(environment: Any, built: Built, kind: str) -> None:
    """One pip command with all files and no index installs them; each imports and tells its version.

    DeepSpeed itself is not in the environment of tests.
    """
    files = {name: pair[kind == "sdist"] for name, pair in built.items()}
    bare = files.pop("accel-deepspeed")
    environment.install("--no-build-isolation", *files.values())
    environment.install("--no-build-isolation", "--no-deps", bare)
    for module in MODULES.values():
        done = environment.python(f"import {module}; print({module}.__file__, {module}.__version__)")
        assert str(environment.folder) in done.stdout


@pytest.mark.parametrize("name", [name for name in MODULES if name != "accel-core"])
def test_a_package_without_its_siblings_is_refused(environment: Any, wheels: dict[str, Path], name: str) -> None:
    """Without an index, a package whose siblings are not named in the same command does not install."""
    done = environment.install(wheels[name], check=False)
    assert done.returncode != 0
    assert "No matching distribution found for accel-" in done.stderr
