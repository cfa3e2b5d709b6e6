"""Steps that never go back: the counters of a run, kept over a resume."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

_LARGEST = 2**62
"""Most libraries keep steps in 64 bits; what is counted on from a step has to fit too."""

logger = logging.getLogger(__name__)


class StepCounter:
    """Knows the last step of every logged name.

    Within one process a step is forwarded as the user gave it. After a resume, a name whose steps start below where
    the run was left is shifted, so that its curve goes on instead of back.
    """

    def __init__(self) -> None:
        self.explicit = False
        self.count = 0
        self.last = -1
        self._last: dict[str, int] = {}
        self._resumed: dict[str, int] = {}
        self._shift: dict[str, int] = {}

    def place(self, names: Iterable[str], step: int | None) -> list[tuple[int | None, int, list[str]]]:
        """Give names their steps."""
        if step is None:
            filled = self.last if self.explicit and self.last >= 0 else self.count
            self.count = filled + (0 if self.explicit else 1)
            self._note(names, filled)
            return [(None, filled, list(names))]
        self.explicit = True
        groups: dict[int, list[str]] = {}
        for name in names:
            groups.setdefault(step + self._shift_of(name, step), []).append(name)
        for placed, members in groups.items():
            self._note(members, placed)
        self.count = max(self.count, self.last + 1)
        return [(placed, placed, members) for placed, members in groups.items()] or [(step, step, [])]

    def _note(self, names: Iterable[str], step: int) -> None:
        self.last = max(self.last, step)
        for name in names:
            self._last[name] = max(step, self._last.get(name, step))

    def _shift_of(self, name: str, step: int) -> int:
        if name in self._resumed:
            left_at = self._resumed.pop(name)  # only a name's first step tells whether its counter begins anew
            if step < left_at:
                self._shift[name] = left_at + 1 - step
                logger.warning(
                    "Steps of %r start at %d after a resume at %d; they continue from %d. Pass the global step, "
                    "or skip the steps that are done.",
                    name,
                    step,
                    left_at,
                    left_at + 1,
                )
        return self._shift.get(name, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as JSON values."""
        return {"explicit": self.explicit, "count": self.count, "last": self.last, "names": dict(self._last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from counters that another process stored."""
        self.explicit = bool(state["explicit"])
        self.count = int(state["count"])
        self.last = int(state["last"])
        self._last = {str(name): int(step) for name, step in state["names"].items()}
        self._resumed = dict(self._last)
        self._shift = {}


def whole_step(step: object) -> int | None:
    """Return a step as an integer; `None`, with a warning, for a value that is not one."""
    if step is None:
        return step
    try:
        # A tensor or array of one element gives its number by `item`; NaN is equal to no whole number.
        number: Any = step.item() if hasattr(step, "item") else step
        if not isinstance(number, str | bytes) and number == (whole := int(number)) and abs(whole) < _LARGEST:
            return whole
    except (ArithmeticError, RuntimeError, TypeError, ValueError):
        pass
    logger.warning("A step is a whole number of 63 bits; got %r. The values are logged without it.", step)
    return None
