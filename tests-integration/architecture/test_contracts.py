"""The import contracts of pyproject.toml hold, and break when an import points upwards."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINTER = Path(sys.executable).with_name("lint-imports")


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """Copy the packages' sources and the contracts, so that one can be broken."""
    for package in (ROOT / "packages").iterdir():
        shutil.copytree(package / "src", tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def check(house: Path) -> "subprocess.CompletedProcess[str]":
    """Run the linter over a copy of the packages."""
    sources = os.pathsep.join(str(folder) for folder in sorted(house.iterdir()) if folder.is_dir())
    return subprocess.run(
        [str(LINTER), "--no-cache", "--config", "pyproject.toml"],
        cwd=house, env={**os.environ, "PYTHONPATH": sources}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_contracts_hold(house: Path) -> None:
    """The copy that the next test breaks is whole before it is broken."""
    done = check(house)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("accel-core/accel_core/errors.py", "import accel_launch", "Distributions depend one way"),
        ("accel-bigmodel/accel_bigmodel/__init__.py", "import accel_launch", "Distributions depend one way"),
        ("accel-launch/accel_launch/__init__.py", "import accel", "Distributions depend one way"),
        ("accel-launch/accel_launch/__init__.py", "import accel_verify", "Distributions depend one way"),
        ("accel-plan/accel_plan/__init__.py", "import accel_launch", "accel-plan stands on"),
        ("accel-quant/accel_quant/__init__.py", "import accel_trackers", "accel-quant stands on"),
        ("accel-verify/accel_verify/__init__.py", "import accel_bigmodel", "accel-verify stands on"),
        ("accel-testing/accel_testing/limits.py", "import accel_launch", "accel-testing stands on"),
        ("accel-core/accel_core/errors.py", "import accel_testing", "Distributions depend one way"),
        ("accel-core/accel_core/errors.py", "import accel_core.host", "accel_core imports downwards"),
        ("accel-core/accel_core/host/environ.py", "def read():\n    import accel_core.options", "imports downwards"),
        ("accel-core/accel_core/host/environ.py", "import torch", "are read without torch"),
    ],
)
def test_an_import_that_points_upwards_breaks_a_contract(house: Path, file: str, line: str, contract: str) -> None:
    """Adding one wrong import to one file makes the linter fail and name the contract."""
    with (house / file).open("a") as source:
        source.write(f"\n{line}\n")
    done = check(house)
    assert done.returncode != 0
    broken = [text for text in done.stdout.splitlines() if " BROKEN" in text]
    assert any(contract in text for text in broken), done.stdout


def test_a_new_folder_has_to_be_given_a_layer(house: Path) -> None:
    """A module of accel_core that the list of layers does not name breaks the contract."""
    (house / "accel-core" / "accel_core" / "newcomer.py").write_text("")
    done = check(house)
    assert done.returncode != 0
    assert "newcomer" in done.stdout
