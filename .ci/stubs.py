"""Write the stubs of the packages whose names are imported when they are first used.

Type checkers and editors read them; `nox -s stubs` writes them and `nox -s lint` fails where one is out of date. The
names and their homes are those of `_NAMES` in the package's `__init__.py`.
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


def stub_of(source: Path) -> str:
    """Return the stub that fits a package's table of names."""
    tree = ast.parse(source.read_text())
    tables = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_NAMES"
    ]
    homes: dict[str, list[str]] = ast.literal_eval(tables[0])
    package = source.parent.name
    lines = [
        f'"""The names of {package}, which are imported when they are first used. Written by `nox -s stubs`."""',
        "",
        f"from {package}._version import __version__ as __version__",
    ]
    for home, names in sorted(homes.items()):
        lines += [f"from {home} import {name} as {name}" for name in sorted(names)]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the stubs, or with `--check` say which differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where a stub is out of date")
    options = parser.parse_args()
    stale = []
    for source in LAZY:
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
