"""What `nox -s house` measures has ceilings, and going over one is a failure."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, which looks at one package with a file of ten lines, half of whose annotations are a bare `Any`."""
    spec = importlib.util.spec_from_file_location("house", ROOT / ".ci" / "house.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "house", program)
    spec.loader.exec_module(program)
    folder = tmp_path / "packages" / "one" / "src" / "one"
    folder.mkdir(parents=True)
    (folder / "part.py").write_text("from typing import Any\n" + "def f(a: Any, b: int) -> None: ...\n" * 9)
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setattr(program, "CEILINGS", tmp_path / "ceilings.txt")
    monkeypatch.setattr(program, "FEW_ANNOTATIONS", 27)
    return program


@pytest.mark.parametrize(
    ("ceilings", "expected"),
    [
        ("one 10\none/src/one 10 34", []),
        ("one 9\none/src/one 10 34", ["packages/one: 10 lines, 1 over its ceiling of 9."]),
        ("one 10\none/src/one 9 34", ["packages/one/src/one: 10 lines, 1 over its ceiling of 9."]),
        ("one 10", ["packages/one/src/one: 33.3 % of annotations are a bare Any; 5.0 % may be"]),
        ("one 10\none/src/one 10 34\none/src/gone 5", ["packages/one/src/gone has a ceiling and no source."]),
    ],
)
def test_ceilings_hold(house: ModuleType, ceilings: str, expected: list[str]) -> None:
    """Lines of a package and of a folder, its bare `Any`, and a ceiling of nothing: each is named when it is broken."""
    house.CEILINGS.write_text(f"# folder, lines, bare Any\n{ceilings}  # why\n")
    broken = house.breaches({"one": house.read(house.ROOT / "packages" / "one" / "src")})
    assert len(broken) == len(expected)
    for sentence, start in zip(broken, expected, strict=True):
        assert sentence.startswith(start)
