"""The house has ceilings, and going over one is a failure."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, which looks at a package of ten code lines, a third of whose annotations are a bare `Any`."""
    spec = importlib.util.spec_from_file_location("house", ROOT / ".ci" / "house.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "house", program)
    spec.loader.exec_module(program)
    folder = tmp_path / "packages" / "one" / "src" / "one"
    folder.mkdir(parents=True)
    functions = "def f(a: Any, b: int) -> None: ...\n" * 9
    (folder / "part.py").write_text(f"from typing import Any\n\n# not counted\n{functions}")
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setattr(program, "CEILINGS", tmp_path / "ceilings.txt")
    monkeypatch.setattr(program, "FEW_ANNOTATIONS", 27)
    return program


@pytest.mark.parametrize(
    ("ceilings", "expected"),
    [
        ("house 10\none 10\none/src/one 34%", []),
        ("house 10\none 9\none/src/one 34%", ["one: 1 code lines over its ceiling"]),
        ("house 9\none 10\none/src/one 34%", ["Ceilings of packages add up to 10; the house's is 9."]),
        ("house 10\none/src/one 34%", ["one: 10 code lines over its ceiling"]),
        ("house 10\none 10", ["one/src/one: 33.3 % of annotations are a bare Any: packages/one/src/one/part.py:4"]),
    ],
)
def test_ceilings_hold(house: ModuleType, ceilings: str, expected: list[str]) -> None:
    """Code lines of a package and of the house, and a folder's bare `Any`: each is named when it is broken."""
    house.CEILINGS.write_text(f"# name, code lines or bare Any\n{ceilings}  # why\n")
    (part,) = house.ROOT.rglob("part.py")
    broken = house.too_much({"one": house.code_lines(part.read_text())})
    assert len(broken) == len(expected)
    for sentence, start in zip(broken, expected, strict=True):
        assert sentence.startswith(start)
