"""Modules that bring torch are imported without garbage collections, and only they are spared later ones."""

import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import gc, sys
from accel_launch.imports import load
seen, frozen = [], gc.get_freeze_count()  # Python 3.12 itself freezes some
gc.callbacks.append(lambda phase, info: seen.append(phase))
assert load(sys.argv[1]).__name__ == sys.argv[1]
print(len(seen), gc.get_freeze_count() > frozen, gc.isenabled())
"""


@pytest.mark.parametrize(("name", "expected"), [("brings_torch", "0 True True"), ("brings_nothing", "0 False True")])
def test_what_brings_torch_is_spared(tmp_path: Path, name: str, expected: str) -> None:
    """Nothing is collected during the import; objects are frozen where torch came; afterwards all is as before."""
    many = "objects = [[] for _ in range(20000)]\n"
    (tmp_path / "torch.py").write_text(many)
    (tmp_path / "brings_torch.py").write_text("import torch\n")
    (tmp_path / "brings_nothing.py").write_text(many)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROBE}"
    done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
