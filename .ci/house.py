"""One table of what the packages are made of, and the limits that they keep.

Run by `nox -s house`. Columns: lines and code lines of a package's source; median and largest file (lines); functions
over 50 lines without their docstring; share of annotations that are a bare `Any`; names that nothing uses (vulture,
less those of Accelerate's public interface and of `.ci/house-allowed.txt`); private names of torch; comments per 100
code lines; code lines that are left under the package's ceiling. Ceilings stand in `.ci/ceilings.txt`.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = ROOT / ".ci" / "house-allowed.txt"
SURFACE = ROOT / "packages" / "accel-compat" / "tests" / "surface" / "surface.json"
LONGEST_FUNCTION = 50
MOST_LONG_FUNCTIONS = 10
CEILINGS = ROOT / ".ci" / "ceilings.txt"
WORDS = ROOT / ".ci" / "words.txt"
MOST_BARE_ANY = 5.0
FEW_ANNOTATIONS = 40
"""A folder with fewer annotations is not held to the share of bare `Any`: one would be a lot."""

_BESIDE_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
_DIRECTIVE = re.compile(r"#\s*(type:|noqa|fmt:|pragma)")
_PRIVATE_TORCH = re.compile(r"torch(?:\.\w+)*\._[a-zA-Z]\w*")


@dataclass
class Findings:
    """What one package is made of.

    Attributes:
        files: Lines of each file, by path.
        code: Lines that hold code: no blank lines, comments or docstrings.
        comments: Comments that are not directives for a tool.
        slots: Annotations of arguments, results and variables, by folder.
        bare: Where an annotation is `Any` alone, or `Any | None`, by folder.
        long: Functions over the limit, as (lines, where).
        private: Private names of torch, with the files that import them.
        dead: Names that nothing uses.
    """

    files: dict[Path, int] = field(default_factory=dict)
    code: int = 0
    comments: int = 0
    slots: Counter[Path] = field(default_factory=Counter)
    bare: dict[Path, list[str]] = field(default_factory=dict)
    long: list[tuple[int, str]] = field(default_factory=list)
    private: dict[str, set[str]] = field(default_factory=dict)
    dead: list[str] = field(default_factory=list)

    @property
    def lines(self) -> int:
        """Lines of all files."""
        return sum(self.files.values())

    @property
    def bare_share(self) -> float:
        """Per cent of annotations that are a bare `Any`."""
        return 100 * sum(map(len, self.bare.values())) / max(self.slots.total(), 1)

    @property
    def bare_shares(self) -> dict[Path, float]:
        """The same for each folder, without those that have few annotations."""
        return {
            folder: 100 * len(self.bare.get(folder, [])) / count
            for folder, count in self.slots.items()
            if count >= FEW_ANNOTATIONS
        }


def read(folder: Path) -> Findings:
    """Measure the source of one package."""
    found = Findings()
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        found.files[path] = len(text.splitlines())
        _count_lines(text, tree, found)
        for node in ast.walk(tree):
            _look_at(node, path.relative_to(ROOT), found)
    return found


def _count_lines(text: str, tree: ast.Module, found: Findings) -> None:
    strings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not _DIRECTIVE.match(token.string):
            found.comments += 1
        elif token.type not in _BESIDE_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    found.code += len(code - strings)


def _look_at(node: ast.AST, path: Path, found: Findings) -> None:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        own = [argument for argument in arguments if argument is not None and argument.arg not in ("self", "cls")]
        for annotation in [*(argument.annotation for argument in own), node.returns]:
            _count_annotation(annotation, path, f"{node.lineno} {node.name}", found)
        documented = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
        text = (node.body[0].end_lineno or 0) - node.body[0].lineno + 1 if documented else 0
        length = (node.end_lineno or node.lineno) - node.lineno + 1 - text
        if length > LONGEST_FUNCTION:
            found.long.append((length, f"{path}:{node.lineno} {node.name}"))
    elif isinstance(node, ast.AnnAssign):
        _count_annotation(node.annotation, path, f"{node.lineno}", found)
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
        for alias in node.names:
            if any(part.startswith("_") for part in f"{node.module}.{alias.name}".split(".")):
                found.private.setdefault(f"{node.module}.{alias.name}", set()).add(path.name)
    elif isinstance(node, ast.Attribute) and _PRIVATE_TORCH.fullmatch(ast.unparse(node)):
        found.private.setdefault(ast.unparse(node), set()).add(path.name)


def _count_annotation(annotation: ast.expr | None, path: Path, where: str, found: Findings) -> None:
    if annotation is None:
        return
    found.slots[path.parent] += 1
    if ast.unparse(annotation).strip("\"'") in ("Any", "Any | None"):
        found.bare.setdefault(path.parent, []).append(f"{path}:{where}")


@dataclass(frozen=True)
class Limits:
    """What `.ci/ceilings.txt` allows.

    Attributes:
        house: Code lines of all packages together.
        code: Code lines of each package.
        bare: Per cent of annotations that may be a bare `Any`, of folders that may have more than the usual.
    """

    house: int
    code: dict[str, int]
    bare: dict[Path, float]


def limits() -> Limits:
    """Read the ceilings: the house's row comes first, a row with a per cent sign is a folder's share of bare `Any`."""
    rows = [line.split("#")[0].split() for line in CEILINGS.read_text().splitlines()]
    (_, house), *rest = filter(None, rows)
    code = {name: int(number) for name, number in rest if not number.endswith("%")}
    bare = {ROOT / "packages" / name: float(number[:-1]) for name, number in rest if number.endswith("%")}
    return Limits(int(house), code, bare)


def public_names() -> set[str]:
    """Return every name of a class, function, member, field and parameter of the interface that accel stands for."""
    found: set[str] = set()

    def walk(value: object) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                found.add(str(name))
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)
        elif isinstance(value, str):
            found.update(re.findall(r"[(,]\s*\*{0,2}(\w+)", value))
            found.add(value)

    walk(json.loads(SURFACE.read_text()))
    return found


def dead(packages: dict[str, Path]) -> dict[str, list[str]]:
    """Return, for each package, the names that vulture finds unused and that the list of allowed names lacks.

    Raises:
        SystemExit: vulture failed, or the list allows a name that is used or gone.
    """
    allowed = {line.split("#")[0].strip() for line in ALLOWED.read_text().splitlines()} - {""}
    public = public_names()
    readers = [ROOT / name for name in ("tests-integration", "examples", "benchmarks", "docs")]
    command = [sys.executable, "-m", "vulture", *(ROOT / "packages").glob("*/src"), *filter(Path.exists, readers)]
    listed = subprocess.run([*map(str, command), "--min-confidence", "60"], capture_output=True, text=True, cwd=ROOT)
    if listed.returncode not in (0, 3):
        raise SystemExit(f"vulture failed:\n{listed.stdout}{listed.stderr}")
    found: dict[str, list[str]] = {name: [] for name in packages}
    met: set[str] = set()
    for line in listed.stdout.splitlines():
        match = re.match(r"(.+?):(\d+): unused (\S+) '(.+)' \(", line)
        if match is None or match[4].startswith("test_"):  # pytest calls those
            continue
        path, number, kind, name = match.groups()
        owner = next((title for title, folder in packages.items() if (ROOT / path).is_relative_to(folder)), None)
        if owner is None:
            continue
        keys = {name, f"{Path(path).name}:{name}"}
        met |= keys & allowed
        if not keys & allowed and name not in public:
            found[owner].append(f"{path}:{number} {kind} {name}")
    stale = sorted(allowed - met)
    if stale:
        raise SystemExit(f"{ALLOWED.relative_to(ROOT)} allows names that are used or gone: {', '.join(stale)}")
    return found


def table(all_found: dict[str, Findings]) -> str:
    """Return the table as text."""
    head = (
        "package",
        "lines",
        "code",
        "median",
        "largest file",
        "> 50",
        "bare Any",
        "dead",
        "private torch",
        "comments",
        "room",
    )
    rows = [head]
    room = limits()
    for name, found in all_found.items():
        largest, length = max(found.files.items(), key=lambda item: item[1])
        rows.append((
            name, f"{found.lines:,}", f"{found.code:,}", f"{statistics.median(found.files.values()):.0f}",
            f"{largest.name} {length}", str(len(found.long)), f"{found.bare_share:.1f} %", str(len(found.dead)),
            str(len(found.private)), f"{100 * found.comments / max(found.code, 1):.1f}",
            f"{room.code.get(name, 0) - found.code:,}",
        ))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) if not column else cell.rjust(width) for column, (cell, width) in enumerate(
            zip(row, widths, strict=True))) for row in rows
    )  # fmt: skip


def unused(names: dict[str, list[str]]) -> list[str]:
    """Return what `dead` found, each as a sentence."""
    return [f"{package}: nothing uses {what}" for package, found in names.items() for what in found]


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


def breaches(all_found: dict[str, Findings]) -> list[str]:
    """Return which limits are broken, each as a sentence."""
    long = sorted((one for found in all_found.values() for one in found.long), reverse=True)
    sentences = unused({name: found.dead for name, found in all_found.items()}) + phrases()
    if len(long) > MOST_LONG_FUNCTIONS:
        sentences.append(f"{len(long)} functions have over {LONGEST_FUNCTION} lines; {MOST_LONG_FUNCTIONS} may:")
        sentences += [f"  {length} lines: {where}" for length, where in long]
    most = limits()
    code = {name: found.code for name, found in all_found.items()}
    if sum(most.code.values()) > most.house:
        sentences.append(f"Ceilings of packages add up to {sum(most.code.values()):,}; the house's is {most.house:,}.")
    for name in sorted(code.keys() | most.code.keys()):
        over = code.get(name, 0) - most.code.get(name, 0)
        if over > 0:
            sentences.append(
                f"{name}: {over:,} code lines over its ceiling in .ci/ceilings.txt. Take lines away, there or in "
                "another package whose room you move here: the house's sum does not rise."
            )
    for folder, share in ((one, share) for found in all_found.values() for one, share in found.bare_shares.items()):
        if share > most.bare.get(ROOT / folder, MOST_BARE_ANY):
            sentences.append(f"{folder}: {share:.1f} % of annotations are a bare Any")
    return sentences


def main() -> int:
    """Print the table, and what is asked for besides; return 1 where what is to be checked is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail where a limit is broken")
    parser.add_argument("--dead", action="store_true", help="print names that nothing uses, no more; fail if any")
    parser.add_argument("--list", choices=("any", "dead", "long", "private"), help="list what a column counts")
    options = parser.parse_args()
    packages = {path.parent.name: path for path in sorted((ROOT / "packages").glob("*/src"))}
    unused_names = dead(packages)
    if options.dead:
        sentences = unused(unused_names)
        print("\n".join(sentences) or "Every name is used, or allowed with a reason.")
        return 1 if sentences else 0
    all_found = {name: read(folder) for name, folder in packages.items()}
    for name, names in unused_names.items():
        all_found[name].dead = names
    print(table(all_found))
    for found in all_found.values() if options.list else ():
        bare = [where for places in found.bare.values() for where in places]
        kept = {"any": bare, "dead": found.dead, "long": found.long, "private": sorted(found.private.items())}
        print("\n".join(map(str, kept[options.list])))
    broken = breaches(all_found)
    if options.check and broken:
        print("\n" + "\n".join(broken))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
