"""What the Python reference sees differently from the source.

Classes of `accel_core._records.record` are the dataclasses that they are, the constructor of an Accelerator has the
fields of its arguments as parameters, an attribute that is passed on has its type and its docstring, and attributes
come after what can be called.
"""

from __future__ import annotations

import ast
from typing import Any

import griffe

RECORD = "accel_core._records.record"
_BEHIND = 1_000_000
"""Lines that no file has: members are shown in the order of their lines."""
DATACLASS = griffe.ExprName("dataclass", parent=griffe.ExprName("dataclasses"))


def _describe(member: griffe.Attribute, made: griffe.ExprCall) -> None:
    """Give an attribute that `Passed` makes its type and its docstring."""
    kind = made.function
    if isinstance(kind, griffe.ExprSubscript) and str(kind.left) in ("Passed", "PassedOn"):
        member.annotation, member.value = kind.slice, None
        member.docstring = griffe.Docstring(ast.literal_eval(str(made.arguments[1])), parent=member)
        member.labels.add("property")


class Records(griffe.Extension):
    """Puts dataclass's name in the place of record's, whose arguments are the same, and attributes last."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Look at the decorators of a class that was read, and at its attributes."""
        for member in cls.members.values():
            if member.is_attribute and member.lineno:
                member.lineno += _BEHIND
            if member.is_attribute and isinstance(member.value, griffe.ExprCall):
                _describe(member, member.value)
        for decorator in cls.decorators:
            if isinstance(decorator.value, griffe.Expr) and decorator.value.canonical_path == RECORD:
                if isinstance(decorator.value, griffe.ExprCall):
                    decorator.value.function = DATACLASS
                else:
                    decorator.value = DATACLASS

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Give the constructor of the Accelerator the fields of its arguments as parameters."""
        if pkg.name == "accel_core":
            constructor, fields = pkg["accelerator.Accelerator.__init__"], pkg["resolve.Arguments"].attributes
            kind = griffe.ParameterKind.positional_or_keyword
            parameters = [
                griffe.Parameter(name, annotation=field.annotation, kind=kind, default=field.value)
                for name, field in fields.items()
                if "property" not in field.labels
            ]
            constructor.parameters = griffe.Parameters(constructor.parameters["self"], *parameters)
