#!/usr/bin/env python3
"""Compare an importable package with surface.json.

    python surface_check.py PACKAGE

For every name of every module in surface.json: it must be importable under PACKAGE, be of the same kind, and take at
least the same parameters, in the same order, with the same defaults (extra keyword parameters with defaults are allowed
at the end or keyword-only; a catch-all `**kwargs` that the original lacks is not). Enum values, constants, dataclass
fields, public methods and properties are compared likewise. Prints what differs, then `N passed, M failed`.
"""

# ruff: noqa: T201

import ast
import dataclasses
import enum
import importlib
import inspect
import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).parent
MISSING = object()


def parameters(signature):
    """Return names, with their stars, and default texts or None, of '(a, b: int = 1, *args) -> X'."""
    text = re.sub(r"<(?:\w+\.)?(\w+)\.(\w+): [^<>]*>", r"\1.\2", signature)  # members of enums
    text = re.sub(r"<[^<>]*>", lambda match: repr(match.group()), text).replace(f"{pathlib.Path.home()}/", "~/")
    found = ast.parse(f"def f{text}: ...").body[0].args
    placed = [*found.posonlyargs, *found.args]
    defaults = [*[None] * (len(placed) - len(found.defaults)), *found.defaults, *found.kw_defaults]
    named = zip([*placed, *found.kwonlyargs], defaults, strict=True)
    out = [(each.arg, default and ast.unparse(default)) for each, default in named]
    out += [(f"*{each.arg}", None) for each in (found.vararg,) if each]
    return out + [(f"**{each.arg}", None) for each in (found.kwarg,) if each]


def same_default(a, b):
    """Whether two default texts denote the same value, as far as text can tell."""
    opaque = ("'<object", "'<function", "'<class", "'<factory>")
    return a == b or (None not in (a, b) and (a.startswith(opaque) or b.startswith(opaque)))


def signature_problem(want, have_obj):
    """Return what a callable's parameters lack, or None."""
    if want is None:
        return None
    try:
        have = parameters(re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(have_obj))))
    except (TypeError, ValueError):
        return None
    want = parameters(want)
    have_names = [n for n, _ in have]
    want_names = [n for n, _ in want]
    if any(n.startswith("**") for n in have_names) and not any(n.startswith("**") for n in want_names):
        return "takes catch-all keyword arguments that the original does not"
    position = -1
    for name, default in want:
        if name.startswith("*"):
            continue
        if name not in have_names:
            return f"lacks parameter {name!r}"
        index = have_names.index(name)
        if index < position:
            return f"parameter {name!r} stands in another place"
        position = index
        if not same_default(default, have[index][1]):
            return f"parameter {name!r} defaults to {have[index][1]}, not {default}"
    for name, default in have:
        if not name.startswith("*") and default is None and name not in [n for n, _ in want]:
            return f"requires an extra parameter {name!r}"
    return None


def same_literal(text, obj):
    """Whether `text` (a repr, possibly cut at 160 characters) denotes an equal set, list or mapping."""
    try:
        return ast.literal_eval(text) == obj
    except (ValueError, SyntaxError):
        return len(text) == 160 and type(obj) in (set, dict, list, tuple)


def compare(entry, obj):
    """Yield problems of one name."""
    kind = entry["kind"]
    if kind == "enum":
        if not (inspect.isclass(obj) and issubclass(obj, enum.Enum)):
            yield "is not an enum"
            return
        for member in entry["values"]:
            if member not in obj.__members__:
                yield f"lacks member {member}"
            elif repr(obj[member].value) != entry["values"][member]:
                yield f"{member} is {obj[member].value!r}, not {entry['values'][member]}"
    elif kind == "class":
        if not inspect.isclass(obj):
            yield "is not a class"
            return
        problem = signature_problem(entry["init"], obj)
        if problem:
            yield f"constructor {problem}"
        have_fields = {f.name for f in dataclasses.fields(obj)} if dataclasses.is_dataclass(obj) else set()
        for field in entry.get("fields", {}):
            if field not in have_fields and not hasattr(obj, field):
                yield f"lacks field {field}"
        for name, member in entry["members"].items():
            found = inspect.getattr_static(obj, name, MISSING)
            if found is MISSING and name not in have_fields:
                yield f"lacks {member['kind']} {name}"
            elif member["kind"] == "method" and inspect.isroutine(getattr(obj, name, None)):
                problem = signature_problem(member["signature"], getattr(obj, name))
                if problem:
                    yield f"{name}() {problem}"
    elif kind == "constant":
        home = str(pathlib.Path.home())
        if repr(obj).replace(home + "/", "~/")[:160] != entry["value"] and not same_literal(entry["value"], obj):
            yield f"is {obj!r}, not {entry['value']}"
    elif kind == "function":
        if not callable(obj):
            yield "is not callable"
            return
        problem = signature_problem(entry["signature"], obj)
        if problem:
            yield problem


def judge(module, name, entry):
    """Return what is wrong with a name of a module; `entry` says what it has to be, if it has to be more than there."""
    try:
        found = getattr(importlib.import_module(module), name)
    except AttributeError:
        return ["is missing"]
    except Exception as error:
        return [f"cannot be had: {error}"]
    return list(compare(entry, found)) if entry else []


def main():
    """Compare and print."""
    surface, package = json.loads((HERE / "surface.json").read_text()), sys.argv[1]
    wanted = [(place, name, entry) for place, names in surface["modules"].items() for name, entry in names.items()]
    wanted += [(place, name, None) for place, names in surface["exports"].items() for name in names]
    for place in surface["modules"]:
        importlib.import_module(re.sub(r"^accelerate", package, place))  # those without a name too
    failed = 0
    for place, name, entry in wanted:
        module = re.sub(r"^accelerate", package, place)
        problems = judge(module, name, entry)
        failed += bool(problems)
        for problem in problems:
            print(f"{module}.{name} {problem}")
    print(f"{len(wanted) - failed} passed, {failed} failed")


if __name__ == "__main__":
    main()
