#!/usr/bin/env python3
"""Compare an importable package with surface.json.

    python surface_check.py [PACKAGE=accelerate] [--modules PREFIX ...] [--quiet]

For every name of every module in surface.json: it must be importable under PACKAGE, be of the same kind, and take at
least the same parameters, in the same order, with the same defaults (extra keyword parameters with defaults are allowed
at the end or keyword-only; a catch-all `**kwargs` that the original lacks is not). Enum values, constants, dataclass
fields, public methods and properties are compared likewise. Prints what differs, then `N passed, M failed`.
"""

# ruff: noqa: T201

import argparse
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
    """Split '(a, b: int = 1, *args) -> X' into [(name, kind prefix, default text or None)]."""
    if signature is None:
        return None
    depth, body, i = 0, "", 0
    for i, char in enumerate(signature):
        depth += char in "([{"
        depth -= char in ")]}"
        if i and depth == 0:
            break
        if i:
            body += char
    parts, depth, part, quote = [], 0, "", None
    for char in body:
        if quote:
            quote = None if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        if char == "," and depth == 0 and not quote:
            parts.append(part)
            part = ""
        else:
            part += char
    if part.strip():
        parts.append(part)
    out = []
    for part in (p.strip() for p in parts):
        if part in ("*", "/"):
            continue
        name = re.match(r"\**\w+", part).group()
        default = None
        depth, quote = 0, None
        for i, char in enumerate(part):
            if quote:
                quote = None if char == quote else quote
            elif char in "'\"":
                quote = char
            elif char in "([{":
                depth += 1
            elif char in ")]}":
                depth -= 1
            elif char == "=" and depth == 0 and part[i - 1] not in "=!<>":
                default = part[i + 1 :].strip()
                break
        out.append((name, default))
    return out


def same_default(a, b):
    """Whether two default texts denote the same value, as far as text can tell."""
    if a is None or b is None:
        return (a is None) == (b is None)
    opaque = ("<object", "<function", "<class", "<factory>")
    if a.startswith(opaque) or b.startswith(opaque):
        return True
    home = str(pathlib.Path.home())

    def clean(text):
        return re.sub(r"<(\w+\.)?(\w+)\.(\w+): .*>", r"\2.\3", text).replace(home + "/", "~/")

    return clean(a) == clean(b)


def signature_problem(want, have_obj):
    """Return what a callable's parameters lack, or None."""
    try:
        have = parameters(re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(have_obj))))
    except (TypeError, ValueError):
        return None
    want = parameters(want)
    if want is None:
        return None
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


def take(module, name):
    """Return a module's name, and what is wrong where it cannot be had."""
    try:
        return getattr(module, name), ""
    except AttributeError:
        return MISSING, "is missing"
    except Exception as error:
        return MISSING, f"cannot be had: {error}"


def main():
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="?", default="accelerate")
    parser.add_argument("--modules", nargs="*", default=[], help="only modules whose old name starts so")
    parser.add_argument("--quiet", action="store_true", help="only the closing line")
    args = parser.parse_args()
    surface = json.loads((HERE / "surface.json").read_text())
    passed = failed = 0
    for module, names in surface["modules"].items():
        if args.modules and not module.startswith(tuple(args.modules)):
            continue
        target = re.sub(r"^accelerate", args.package, module)
        try:
            loaded = importlib.import_module(target)
        except Exception as error:
            failed += max(1, len(names))
            if not args.quiet:
                print(f"{target}: cannot be imported: {type(error).__name__}: {error}")
            continue
        for name, entry in names.items():
            found, problem = take(loaded, name)
            problems = [problem] if problem else list(compare(entry, found))
            failed += bool(problems)
            passed += not problems
            if not args.quiet:
                for problem in problems:
                    print(f"{target}.{name} {problem}")
    for package, names in surface["exports"].items():
        if args.modules and not package.startswith(tuple(args.modules)):
            continue
        target = re.sub(r"^accelerate", args.package, package)
        try:
            loaded = importlib.import_module(target)
        except Exception:
            failed += len(names)
            continue
        for name in names:
            _, problem = take(loaded, name)
            failed += bool(problem)
            passed += not problem
            if problem and not args.quiet:
                print(f"{target}.{name} {problem}")
    print(f"{passed} passed, {failed} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
