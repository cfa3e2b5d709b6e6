"""Write the stubs of the packages whose names are imported when they are first used.

Type checkers and editors read them; `nox -s stubs` writes them and `nox -s lint` fails where one is out of date. The
names and their homes are those of `_NAMES` in the package's `__init__.py`. The drop-in's paths of Accelerate have some
names at once, and those of `_LATER` later.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAZY = [
    ROOT / "packages" / name / "__init__.py"
    for name in ("accel-all/src/accel", "accel-bigmodel/src/accel_bigmodel", "accel-plan/src/accel_plan")
]

DROP_IN = ROOT / "packages" / "accel-compat" / "src" / "accelerate"
MIRRORS = [path for path in sorted(DROP_IN.rglob("*.py")) if "\n_LATER = " in path.read_text()]


def stub_of(source: Path) -> str:
    """Return the stub that fits a package's table of names, or a path of Accelerate with its names."""
    tree = ast.parse(source.read_text())
    tables = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    homes: dict[str, list[str]] = ast.literal_eval(tables["_LATER" if source in MIRRORS else "_NAMES"])
    names = {(home, name) for home, listed in homes.items() for name in listed}
    if source in MIRRORS:
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        found = {(str(node.module), each) for node in imports for each in node.names}
        names |= {(home, each.name) for home, each in found if each.name in (each.asname, "*")}
    package = source.as_posix().rpartition("/src/")[2].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    lines = [f"from {home} import {name} as {name}".removesuffix(" as *") for home, name in sorted(names)]
    if source.name == "__init__.py" and (source.parent / "_version.py").exists():
        lines.insert(0, f"from {source.parent.name}._version import __version__ as __version__")
    head = f'"""The names of {package}, which are imported when they are first used. Written by `nox -s stubs`."""'
    return "\n".join([head, "", *lines, ""])


def main() -> int:
    """Write the stubs, or with `--check` say which differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where a stub is out of date")
    options = parser.parse_args()
    stale = []
    for source in [*LAZY, *MIRRORS]:
        stub, text = source.with_suffix(".pyi"), stub_of(source)
        if not stub.exists() or stub.read_text() != text:
            stale.append(stub.relative_to(ROOT))
            if not options.check:
                stub.write_text(text)
    for path in stale:
        print(f"{path} is out of date: run `nox -s stubs`" if options.check else f"wrote {path}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
