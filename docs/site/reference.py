"""The Python reference: one page for each part of each package, and what its docstrings lack."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "accel_core": "accel-core", "accel_bigmodel": "accel-bigmodel", "accel_launch": "accel-launch",
    "accel_plan": "accel-plan", "accel_quant": "accel-quant", "accel_trackers": "accel-trackers",
    "accel_verify": "accel-verify", "accel_deepspeed": "accel-deepspeed", "accel_megatron": "accel-megatron",
    "accel_parallel": "accel-parallel", "accel_torchft": "accel-torchft", "accel_testing": "accel-testing",
}  # fmt: skip
"""Import packages whose modules have pages, each with its folder."""


def source_folder(package: str) -> Path:
    """Return the folder that holds a package's modules."""
    return ROOT / "packages" / PACKAGES[package] / "src" / package


@cache
def parts(package: str) -> dict[str, list[str]]:
    """Return the parts of a package, a folder or a file each, with the public modules in them."""
    found: dict[str, list[str]] = {}
    folder = source_folder(package)
    for path in sorted(folder.rglob("*.py")):
        names = path.relative_to(folder).with_suffix("").parts
        if any(name.startswith("_") and name != "__init__" for name in names) or not _public_names(path):
            continue
        if names == ("__init__",):
            continue  # it imports what its modules define
        module = ".".join([package, *(name for name in names if name != "__init__")])
        found.setdefault(names[0], []).append(module)
    return found


def _public_names(path: Path) -> list[str]:
    """Return the functions, classes and values that a module defines, without those that begin with `_`."""
    defined: list[str] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.append(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        defined += [target.id for target in targets if isinstance(target, ast.Name)]
    return sorted({name for name in defined if not name.startswith("_")})


def navigation() -> list[Any]:
    """Return the reference's part of the navigation."""
    entries: list[Any] = [{"Names of accel": "reference/api/accel.md"}]
    entries += [{package: [{part: page_of(package, part)} for part in parts(package)]} for package in PACKAGES]
    return [*entries, {"accelerate": "reference/api/accelerate.md"}]


def page_of(package: str, part: str) -> str:
    """Return the page of a part of a package."""
    return f"reference/api/{package}/{part}.md"


def internal() -> set[str]:
    """Return the pages of the parts of which `accel` exports nothing."""
    exported = {page_of(*part.split(".")) for part in flat_names()}
    return {page_of(package, part) for package in PACKAGES for part in parts(package)} - exported


def pages() -> dict[str, str]:
    """Return the text of every page of the reference."""
    made = {}
    for package in PACKAGES:
        for part, modules in parts(package).items():
            lines = [f"# {package}.{part}", ""]
            for module in modules:
                lines += [f"::: {module}", "    options:", f"      members: {_members(module)}"]
                if module == f"{package}.{part}":  # its name is the page's heading
                    lines += ["      show_root_heading: false", "      show_root_toc_entry: false"]
                lines.append("")
            made[page_of(package, part)] = "\n".join(lines)
    return made


def _members(module: str) -> str:
    return "[" + ", ".join(_public_names(_file_of(module))) + "]"


def _file_of(module: str) -> Path:
    package, _, rest = module.partition(".")
    path = source_folder(package).joinpath(*rest.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _homes(path: Path) -> dict[str, list[str]]:
    """Return the table of a package whose names are imported when they are first used."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_NAMES":
            table: dict[str, list[str]] = ast.literal_eval(node.value)
            return table
    raise LookupError(f"{path} has no table _NAMES")


def flat_names() -> dict[str, list[str]]:
    """Return the full names behind `accel`, by the part of the package that defines them."""
    topics: dict[str, list[str]] = {}
    homes = _homes(ROOT / "packages" / "accel-all" / "src" / "accel" / "__init__.py")
    for home, names in ((_moved(home), names) for home, names in homes.items()):
        topics.setdefault(".".join(home.split(".")[:2]), []).extend(f"{home}.{name}" for name in names)
    return topics


def _moved(home: str) -> str:
    """Return the module that has a module's names: another one where an engine's plugin has left its old path."""
    word = re.search(r'attach_moved\(__name__, "(\w+)"\)', _file_of(home).read_text())
    if word is None:
        return home
    rows = "".join(path.read_text() for path in sorted(ROOT.glob("packages/*/src/*/row.py")))
    new = re.search(rf'plugin="([\w.]+):\w+",\s*argument="{word[1]}_plugin"', rows)
    assert new is not None, f"no package has the plugin of {home}"
    return new[1]


def summary(path: str) -> str:
    """Return the first line of a name's docstring."""
    found = _package(path.split(".")[0])[path.split(".", 1)[1]]
    text = found.docstring.value if found.docstring else ""
    return text.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def drop_in() -> Iterator[tuple[str, list[str]]]:
    """Yield the public modules of the drop-in, each with the names that it imports."""
    folder = ROOT / "packages" / "accel-compat" / "src" / "accelerate"
    for path in sorted(folder.rglob("*.py")):
        names = path.relative_to(folder).with_suffix("").parts
        if any(name.startswith("_") and name != "__init__" for name in names):
            continue
        listed = sorted(set(_imported_names(path)))
        if listed:
            yield ".".join(["accelerate", *(name for name in names if name != "__init__")]), listed


def _imported_names(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            names = (item.asname or item.name for item in node.names)
            yield from (name for name in names if not name.startswith("_") and name != "*")


@cache
def _package(package: str) -> griffe.Module:
    folders = [str(source_folder(name).parent) for name in PACKAGES]
    loader = griffe.GriffeLoader(search_paths=folders, docstring_parser="google")
    return loader.load(package)


def problems() -> list[str]:
    """Return a line for each public name without a docstring, and for each section that a docstring lacks."""
    found = []
    for package in PACKAGES:
        found += [f"{item.path} has no docstring" for item in _described(_package(package)) if not item.has_docstring]
        found += lacking(package)
    return [*found, *(f"{path} has no section `Examples:`" for path in without_example())]


def without_example() -> Iterator[str]:
    """Yield the functions and classes behind `accel`, and the methods of `Accelerator`, that show no call.

    Errors and enumerations need none.
    """
    called = [_found(path) for paths in flat_names().values() for path in paths]
    called += [item for item in _found("accel_core.accelerator.Accelerator").members.values() if item.is_function]
    for item in called:
        needs_none = item.is_attribute or item.name.startswith("_") or item.path.startswith(_WITHOUT_CALL)
        sections = item.docstring.parse("google", warnings=False) if item.docstring else []
        if not needs_none and griffe.DocstringSectionKind.examples not in {section.kind for section in sections}:
            yield item.path


_WITHOUT_CALL = ("accel_core.errors.", "accel_core.options.enums.")


def _found(path: str) -> griffe.Object:
    """Return what a full name stands for, where it is defined."""
    package, _, rest = path.partition(".")
    found = _package(package)[rest]
    return found.final_target if found.is_alias else found


_NO_RESULT = ("None", "NoReturn", "Never", "Iterator[None]")
"""Annotations of functions without a result; the last one is that of a block and of a pytest fixture."""


def lacking(package: str) -> list[str]:
    """Return a line for each function that users look up whose docstring leaves an argument or the result out.

    Users look up what `accel` exports, and what they extend: abstract classes and protocols. Elsewhere one sentence
    is enough. A first line that describes the result, and a base class that describes the method, do too.
    """
    found = []
    for item in _described(_package(package)):
        if isinstance(item, griffe.Function) and item.docstring and _is_looked_up(item) and not _is_inherited(item):
            kinds = {section.kind for section in item.docstring.parse("google")}
            first = item.docstring.value.split(maxsplit=1)[0]
            if _takes(item) and griffe.DocstringSectionKind.parameters not in kinds:
                found.append(f"{item.path} has arguments and no section `Args:`")
            told = first in ("Return", "Yield") or kinds & {
                griffe.DocstringSectionKind.returns, griffe.DocstringSectionKind.yields,
            }  # fmt: skip
            if str(item.returns or "None") not in _NO_RESULT and not told:
                found.append(f"{item.path} returns something and has no section `Returns:`")
    return found


def _is_looked_up(function: griffe.Function) -> bool:
    """Return whether `accel` exports a function or its class, or users extend the class."""
    owner = function.parent if isinstance(function.parent, griffe.Class) else function
    exported = {path for paths in flat_names().values() for path in paths}
    bases = owner.bases if isinstance(owner, griffe.Class) else []
    return owner.path in exported or any(str(base).split("[")[0] in ("ABC", "Protocol") for base in bases)


def _takes(function: griffe.Function) -> bool:
    return any(each.name not in ("self", "cls") and not each.name.startswith("_") for each in function.parameters)


def _is_inherited(function: griffe.Function) -> bool:
    """Return whether a base class of the packages has a method of the same name, whose docstring describes it."""
    owner = function.parent
    bases = owner.mro() if isinstance(owner, griffe.Class) else []
    return any(function.name in base.members and base.members[function.name].has_docstring for base in bases)


def _described(item: griffe.Object) -> Iterator[griffe.Object]:
    """Yield all modules, classes and functions that a reader can see."""
    for name, member in item.members.items():
        if member.is_alias or name.startswith("_"):
            continue
        if member.is_module or member.is_class or member.is_function:
            yield member
        if member.is_module or member.is_class:
            yield from _described(member)
