"""Measure the packages: code lines against their ceilings, and the share of annotations that are a bare `Any`.

Run by `nox -s lint`. A code line is not blank, a comment or part of a docstring. Ceilings stand in
`.ci/ceilings.txt`, phrases that source and docs do not use in `.ci/words.txt`.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CEILINGS = ROOT / ".ci" / "ceilings.txt"
WORDS = ROOT / ".ci" / "words.txt"
MOST_BARE_ANY = 5.0
FEW_ANNOTATIONS = 40
"""A folder with fewer annotations is not held to the share of bare `Any`: one would be a lot."""

_BESIDE_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


@dataclass
class Annotations:
    """How many annotations of arguments, results and variables there are, and where one is a bare `Any`."""

    total: int = 0
    bare: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Per cent of annotations that are `Any` alone, or `Any | None`."""
        return 100 * len(self.bare) / max(self.total, 1)


def code_lines(text: str) -> int:
    """Return how many lines of a source text hold code."""
    strings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = (one for one in tokenize.generate_tokens(io.StringIO(text).readline) if one.type not in _BESIDE_CODE)
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - strings)


def annotations(folder: Path) -> Annotations:
    """Return the annotations in the files of one folder."""
    found = Annotations()
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.arg, ast.AnnAssign)):
                one = node.annotation
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                one = node.returns
            else:
                continue
            found.total += one is not None
            if one is not None and ast.unparse(one).strip("\"'") in ("Any", "Any | None"):
                found.bare.append(f"{path.relative_to(ROOT)}:{one.lineno}")
    return found


def ceilings() -> dict[str, float]:
    """Return what may be at most: code lines of `house` and of each package, per cent of bare `Any` of a folder."""
    rows = [line.split("#")[0].split() for line in CEILINGS.read_text().splitlines()]
    return {row[0]: float(row[1].rstrip("%")) for row in rows if row}


def too_much(code: dict[str, int]) -> list[str]:
    """Return which ceilings are broken, each as a sentence."""
    most = ceilings()
    house = most.pop("house")
    rows = sum(int(number) for name, number in most.items() if "/" not in name)
    sentences = []
    if rows > house:
        sentences.append(f"Ceilings of packages add up to {rows:,}; the house's is {house:,.0f}.")
    for name, lines in code.items():
        if lines > most.get(name, 0):
            sentences.append(
                f"{name}: {lines - most.get(name, 0):,.0f} code lines over its ceiling in .ci/ceilings.txt. Take lines "
                "away, there or in another package whose room you move here: the house's sum does not rise."
            )
    for folder in sorted({path.parent for path in ROOT.glob("packages/*/src/**/*.py")}):
        found, name = annotations(folder), folder.relative_to(ROOT / "packages").as_posix()
        if found.total >= FEW_ANNOTATIONS and found.share > most.get(name, MOST_BARE_ANY):
            sentences.append(f"{name}: {found.share:.1f} % of annotations are a bare Any: {', '.join(found.bare)}")
    return sentences


def phrases() -> list[str]:
    """Return where source or docs use a phrase that `.ci/words.txt` refuses, each as a sentence."""
    rows = [line.split("    ") for line in WORDS.read_text().splitlines() if line and not line.startswith("#")]
    refused = [(re.compile(pattern, re.IGNORECASE), better) for pattern, better in rows]
    readable = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")]
    return [
        f"{path.relative_to(ROOT)}:{number}: {found[0]!r}; write {better}"
        for path in [*readable, *ROOT.glob("packages/*/*.md")]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for pattern, better in refused
        if (found := pattern.search(line))
    ]


def main() -> int:
    """Print a package's code lines and the room under its ceiling; return 1 where something is over it."""
    sources = {path.parent.name: path for path in sorted(ROOT.glob("packages/*/src"))}
    code = {name: sum(code_lines(p.read_text()) for p in folder.rglob("*.py")) for name, folder in sources.items()}
    most = ceilings()
    for name, lines in {"house": sum(code.values()), **code}.items():
        print(f"{name:16} {lines:7,} code lines, room for {most.get(name, 0) - lines:,.0f}")
    broken = too_much(code) + phrases()
    print("\n".join(broken))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
