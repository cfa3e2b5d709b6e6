"""Lets the Python reference see the classes of `accel_core._records.record` as the dataclasses that they are."""

from __future__ import annotations

from typing import Any

import griffe

RECORD = "accel_core._records.record"
DATACLASS = griffe.ExprName("dataclass", parent=griffe.ExprName("dataclasses"))


class Records(griffe.Extension):
    """Puts dataclass's name in the place of record's, whose arguments are the same."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Look at the decorators of a class that was read."""
        for decorator in cls.decorators:
            if isinstance(decorator.value, griffe.Expr) and decorator.value.canonical_path == RECORD:
                if isinstance(decorator.value, griffe.ExprCall):
                    decorator.value.function = DATACLASS
                else:
                    decorator.value = DATACLASS
