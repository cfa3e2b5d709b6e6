"""A pickle read as a description: nothing that it names is imported, called or made.

What `torch.distributed.checkpoint` writes as `.metadata` is a pickle of its own records. Here its instructions build
lists, dicts, tuples, numbers, texts and `Made`, which only notes what the pickle wants made of what. Memory is bounded
by the size of the pickle and a constant factor.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

__all__ = ["Global", "Made", "describe"]

_PROTOCOLS = range(2, 6)


class Global(tuple[str, str]):
    """The module and the name of something that a pickle wants imported."""


class Made:
    """Something that a pickle wants made.

    Attributes:
        kind: What is to be called.
        args: With which arguments.
        state: What its attributes are to be set from; `None` if nothing.
    """

    __slots__ = ("args", "kind", "state")

    def __init__(self, kind: Global, args: tuple[Any, ...]) -> None:
        self.kind = kind
        self.args = args
        self.state: Any = None


def describe(raw: bytes) -> Any:
    """Return what a pickle describes.

    Raises:
        ValueError: It is damaged, or holds what no record of shards needs.
    """
    machine = _Machine(raw)
    try:
        return machine.run()
    except (IndexError, KeyError, TypeError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"a damaged pickle ({type(error).__name__} at byte {machine.at})") from error


class _Machine:
    """Follows the instructions of a pickle."""

    def __init__(self, raw: bytes) -> None:
        self.at = 0
        self._raw = raw
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Follow all instructions, and return what the last one leaves."""
        raw, actions = self._raw, _ACTIONS
        while True:
            code = raw[self.at]
            self.at += 1
            if code == _STOP:
                break
            action = actions.get(code)
            if action is None:
                raise ValueError(f"the instruction {code:#04x} at byte {self.at - 1}, which no record of shards needs")
            action(self)
        if self._marks or len(self._stack) != 1:
            raise ValueError("a damaged pickle (it ends in the middle)")
        return self._stack[0]

    def _take(self, count: int) -> bytes:
        taken = self._raw[self.at : self.at + count]
        if len(taken) != count:
            raise ValueError("a damaged pickle (it is cut off)")
        self.at += count
        return taken

    def _number(self, form: str) -> int:
        size = struct.calcsize(form)
        (number,) = struct.unpack(form, self._take(size))
        return int(number)

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def protocol(self) -> None:
        if self._number("<B") not in _PROTOCOLS:
            raise ValueError("a pickle of a protocol that torch does not write")

    def frame(self) -> None:
        self._take(8)

    def mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def text(self, form: str) -> None:
        self._push(self._take(self._number(form)).decode("utf-8", "surrogatepass"))

    def old_text(self) -> None:
        # Only in pickles that somebody wrote by hand: with it, what they want called has a name in the error.
        end = self._raw.index(b"\n", self.at)
        self._push(self._raw[self.at : end].decode("latin1").strip("'\""))
        self.at = end + 1

    def long(self) -> None:
        self._push(int.from_bytes(self._take(self._number("<B")), "little", signed=True))

    def tuple_of(self, count: int) -> None:
        items = [self._stack.pop() for _ in range(count)]
        self._push(tuple(reversed(items)))

    def marked_tuple(self) -> None:
        self._push(tuple(self._since_mark()))

    def append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise ValueError("a damaged pickle (items of what is no list)")
        target.extend(items)

    def set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError("a damaged pickle (items of what is no dict)")
        target.update(zip(items[::2], items[1::2], strict=True))

    def memoize(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    def recall(self, form: str) -> None:
        self._push(self._memo[self._number(form)])

    def named(self) -> None:
        end = self._raw.index(b"\n", self.at)
        after = self._raw.index(b"\n", end + 1)
        module, name = self._raw[self.at : end].decode(), self._raw[end + 1 : after].decode()
        self.at = after + 1
        self._push(Global((module, name)))

    def named_by_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise ValueError("a damaged pickle (a name that is no text)")
        self._push(Global((module, name)))

    def make(self) -> None:
        args, kind = self._stack.pop(), self._stack.pop()
        if type(kind) is not Global or type(args) is not tuple:
            raise ValueError("a damaged pickle (it makes something of what has no name)")
        self._push(Made(kind, args))

    def build(self) -> None:
        state, made = self._stack.pop(), self._stack[-1]
        if type(made) is not Made:
            raise ValueError("a damaged pickle (it sets attributes of what was not made)")
        made.state = state


_STOP = ord(".")
_ACTIONS: dict[int, Callable[[_Machine], None]] = {
    0x80: _Machine.protocol,
    0x95: _Machine.frame,
    ord("("): _Machine.mark,
    ord("}"): lambda machine: machine._push({}),
    ord("]"): lambda machine: machine._push([]),
    ord(")"): lambda machine: machine._push(()),
    ord("t"): _Machine.marked_tuple,
    0x85: lambda machine: machine.tuple_of(1),
    0x86: lambda machine: machine.tuple_of(2),
    0x87: lambda machine: machine.tuple_of(3),
    ord("a"): lambda machine: machine.append([machine._stack.pop()]),
    ord("e"): lambda machine: machine.append(machine._since_mark()),
    ord("s"): lambda machine: machine.set([machine._stack.pop(-2), machine._stack.pop()]),
    ord("u"): lambda machine: machine.set(machine._since_mark()),
    ord("N"): lambda machine: machine._push(None),
    0x88: lambda machine: machine._push(True),
    0x89: lambda machine: machine._push(False),
    ord("J"): lambda machine: machine._push(machine._number("<i")),
    ord("K"): lambda machine: machine._push(machine._number("<B")),
    ord("M"): lambda machine: machine._push(machine._number("<H")),
    0x8A: _Machine.long,
    ord("X"): lambda machine: machine.text("<I"),
    ord("S"): _Machine.old_text,
    0x8C: lambda machine: machine.text("<B"),
    0x94: lambda machine: machine.memoize(len(machine._memo)),
    ord("q"): lambda machine: machine.memoize(machine._number("<B")),
    ord("r"): lambda machine: machine.memoize(machine._number("<I")),
    ord("h"): lambda machine: machine.recall("<B"),
    ord("j"): lambda machine: machine.recall("<I"),
    ord("c"): _Machine.named,
    0x93: _Machine.named_by_stack,
    ord("R"): _Machine.make,
    0x81: _Machine.make,
    ord("b"): _Machine.build,
}
