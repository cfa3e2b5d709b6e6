"""What a breach of the laws of ARCHITECTURE.md looks like in source code."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "packages").glob("*/src/*"))
FORBIDDEN_NAMES = re.compile(r"^_?(utils?|helpers?|common|misc|other|base_.*)$")
ENVIRONMENT_READER = "accel_core/host/environ.py"
OWN = {path.name for path in SOURCES}
ENGINES = {"deepspeed": 78, "fsdp": 110, "megatron": 26}
"""Lines of accel-core and accel-launch that may name an engine: they say names that Accelerate's API or torch fixes, or
tell a user. What an engine does is in its own package."""
_WARNS = ("warn", "warning", "warning_once", "expect")
_PRIVATE_CALL = re.compile(r"(?<![\w/])(?:\w+\.)?_[a-z]\w*\(")


@dataclass(frozen=True)
class Breach:
    """A place that breaks a law."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


def files() -> Iterator[tuple[str, ast.Module]]:
    """Yield every source file of every package: its path below `src/`, and its syntax tree."""
    for package in SOURCES:
        for path in sorted(package.rglob("*.py")):
            yield path.relative_to(package.parent).as_posix(), ast.parse(path.read_text())


def lines_that_name(engine: str, folders: Iterable[Path] = SOURCES) -> list[Breach]:
    """Find the lines of core and launcher in which an engine's name stands, in whatever case."""
    return [
        Breach(path.relative_to(package.parent).as_posix(), number, line.strip())
        for package in folders
        if package.name in ("accel_core", "accel_launch")
        for path in sorted(package.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if engine in line.lower()
    ]


def badly_named() -> list[Breach]:
    """Find files and folders whose name says nothing about their job."""
    return [
        Breach(path.relative_to(package.parent).as_posix(), 1, f"a file or folder called {path.stem}")
        for package in SOURCES
        if package.name != "accelerate"  # the drop-in has the original's paths
        for path in sorted(package.rglob("*"))
        if path.suffix in ("", ".py") and FORBIDDEN_NAMES.match(path.stem)
    ]


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the modules that an import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or "."]


def local_imports(name: str, tree: ast.Module) -> list[Breach]:
    """Find imports inside functions of what is always there: own packages and the standard library.

    torch is left out: files that must be read without it may import it in a method.
    """
    found = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    for module in imported(node):
                        top = module.split(".")[0]
                        if top in OWN or top in sys.stdlib_module_names:
                            found[node.lineno] = Breach(name, node.lineno, f"imports {module} inside a function")
    return list(found.values())


def environment_reads(name: str, tree: ast.Module) -> list[Breach]:
    """Find `os.environ` and `os.getenv` outside the environment's reader and the guards of the testing kit."""
    if name == ENVIRONMENT_READER or name.startswith("accel_testing/"):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            if node.attr in ("environ", "getenv", "putenv", "unsetenv"):
                found.append(Breach(name, node.lineno, f"uses os.{node.attr}"))
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [Breach(name, node.lineno, f"imports os.{a.name}") for a in node.names if a.name == "environ"]
    return found


def label_ladders(name: str, tree: ast.Module) -> list[Breach]:
    """Find comparisons of `distributed_type` with members of the enum: a strategy answers by a method instead."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            labels = {getattr(side, "attr", getattr(side, "id", "")) for side in sides}
            members = [part for side in sides for part in ast.walk(side) if isinstance(part, ast.Attribute)]
            if "distributed_type" in labels and any(part.attr.isupper() for part in members):
                found.append(Breach(name, node.lineno, "compares distributed_type"))
    return found


def literal_limits(name: str, tree: ast.Module) -> list[Breach]:
    """Find waits of a test that end after a number of seconds: `accel_testing.limits` knows what a machine needs.

    Waits of less than a second are there to run out.
    """
    found = []
    for node in ast.walk(tree):
        seconds: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("wait", "join", "communicate", "poll"):
                seconds = node.args[:1]
            if node.func.attr in ("wait", "join", "communicate", "run", "check_output", "check_call"):
                seconds = [*seconds, *(word.value for word in node.keywords if word.arg == "timeout")]
        elif isinstance(node, ast.BinOp | ast.Compare) and "time.monotonic()" in ast.unparse(node):
            seconds = [node.right] if isinstance(node, ast.BinOp) else node.comparators
        numbers = [part.value for part in seconds if isinstance(part, ast.Constant)]
        if any(isinstance(number, int | float) and number >= 1 for number in numbers):
            found.append(Breach(name, node.lineno, f"waits for {numbers[0]} s; use accel_testing.limits"))
    return found


def tests() -> Iterator[tuple[str, ast.Module]]:
    """Yield every file of the tests and its syntax tree."""
    for folder in (*sorted((ROOT / "packages").glob("*/tests")), ROOT / "tests-integration"):
        for path in sorted(folder.rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def absent_accelerators(name: str, tree: ast.Module) -> list[Breach]:
    """Find questions for the accelerator that torch was built for, which need not be in this machine.

    `check_available` would ask for both, from torch 2.7 on.
    """
    asked = {"current_accelerator", "is_available"}
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)] or [tree]
    found = []
    for scope in scopes:
        calls = [
            node for node in ast.walk(scope) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        ]
        named = {call.func.attr: call for call in calls if call.func.attr in asked}  # type: ignore[attr-defined]
        if "current_accelerator" in named and "is_available" not in named:
            found.append(
                Breach(name, named["current_accelerator"].lineno, "calls current_accelerator and not is_available")
            )
    return found


def private_advice(name: str, tree: ast.Module) -> list[Breach]:
    """Find errors and warnings that tell a user to call a private method."""
    said = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and ast.unparse(node.func).endswith(_WARNS))
    ]
    return [
        Breach(name, text.lineno, text.value)
        for node in said
        for text in ast.walk(node)
        if isinstance(text, ast.Constant) and isinstance(text.value, str) and _PRIVATE_CALL.search(text.value)
    ]
