"""A package's version moves alone: what stands on another package does not notice."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.full("packages from source")
def test_a_pinned_bigmodel_outlives_a_bump_of_launch(environment: Any, tmp_path: Path) -> None:
    """A toy library that wants one exact accel-bigmodel works before and after accel-launch got a breaking version."""
    folders = [tmp_path / name for name in ("accel-core", "accel-bigmodel", "accel-launch")]
    for folder in folders:
        ignored = shutil.ignore_patterns("__pycache__", "tests", "dist")
        shutil.copytree(ROOT / "packages" / folder.name, folder, ignore=ignored)
    toy = tmp_path / "toy"
    (toy / "toy").mkdir(parents=True)
    pin = (folders[1] / "src" / "accel_bigmodel" / "_version.py").read_text().split('"')[-2]
    (toy / "pyproject.toml").write_text(TOY.format(pin=pin))
    (toy / "toy" / "__init__.py").write_text(USE)
    environment.install("--no-build-isolation", *folders, toy)
    ask = "import toy, accel_launch; print(toy.blank(), accel_launch.__version__)"
    assert environment.python(ask).stdout.split() == ["meta", "0.1.0"]
    version = folders[2] / "src" / "accel_launch" / "_version.py"
    version.write_text(version.read_text().replace("0.1.0", "0.2.0"))
    environment.install("--no-build-isolation", "--upgrade", folders[0], folders[2], toy)
    assert environment.python(ask).stdout.split() == ["meta", "0.2.0"]
    conflicts = environment.run("python", "-m", "pip", "check", check=False).stdout
    assert not re.search("accel|toy", conflicts), conflicts
