"""Layouts as they are written on a command line: "fsdp2xtp2", "hsdp2x2", "dp4", "zero3x2"."""

from __future__ import annotations

import re
from collections.abc import Iterable

from accel_core._records import record
from accel_core.errors import ConfigurationError
from accel_core.mesh.layout import MESH_AXES, Layout
from accel_core.options.enums import meant

LAYOUT_HELP = (
    "single, dp4, fsdp4, hsdp2x2 (copies x shards), ep2, tp2, cp2, pp2, zero3x4 (stage x ranks), or several joined by "
    "x: fsdp2xtp2"
)

_AXES = {
    "single": (),
    "dp": ("dp_replicate",),
    "fsdp": ("dp_shard",),
    "hsdp": ("dp_replicate", "dp_shard"),
    "ep": ("ep",),
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "sp": ("sp",),
    "zero": ("stage", "dp_replicate"),
}
"""For each word, what its numbers are."""

_WORD = re.compile(r"([a-z]+)(\d*)")
_STAGES = (1, 2, 3)


@record(frozen=True)
class LayoutSpec:
    """How many ranks share what, and by which engine."""

    name: str  # how it was written
    engine: str  # the strategy that trains so: "single", "ddp", "fsdp", "mesh" or "deepspeed"
    # For each axis that was named, outermost first, its name and its number of ranks.
    sizes: tuple[tuple[str, int], ...]
    zero_stage: int | None = None  # the stage of ZeRO; `None` for other engines

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.layout().world_size

    def size(self, *axes: str) -> int:
        """Return how many ranks lie along some axes together; 1 for axes that were not named."""
        return self.layout().size(*axes)

    def layout(self, rank: int = 0) -> Layout:
        """Return what a rank does."""
        return Layout(rank, self.sizes)


def parse_layout(text: str, *, zero_ranks: int = 2) -> LayoutSpec:
    """Read a layout.

    Words are joined by "x" and followed by their number of ranks: `dp` copies the model, `fsdp` shards it (by version
    2), `hsdp` shards it and copies the shards, `ep` shares out experts, `tp` shares matrix products, `cp` and `sp`
    share sequences, `pp` shares out blocks, and `zero` is DeepSpeed's, with its stage first.

    >>> parse_layout("hsdp2x4xtp2").sizes
    (('dp_replicate', 2), ('dp_shard', 4), ('tp', 2))

    Raises:
        ConfigurationError: A word that is none, a size that is missing or no positive number, an axis named twice, or
            axes that no engine combines.
    """
    found: dict[str, int] = {}
    words: list[str] = []
    for word, numbers in _words(text):
        if word == "zero" and len(numbers) == 1:
            numbers = [*numbers, zero_ranks]
        axes = _AXES[word]
        if len(numbers) != len(axes) or any(number < 1 for number in numbers):
            raise ConfigurationError(
                f"In a layout {word!r} is followed by {len(axes)} numbers of 1 or more, joined by x; got {numbers} in "
                f"{text!r}. Write for example {LAYOUT_HELP}."
            )
        for axis, number in zip(axes, numbers, strict=True):
            if axis in found:
                raise ConfigurationError(
                    f"A layout names each axis once; got {axis} twice in {text!r}. Write its whole size in one place."
                )
            found[axis] = number
        words.append(word)
    stage = found.pop("stage", None)
    spec = LayoutSpec(
        "".join(text.lower().split()),
        _engine(words, found),
        tuple((axis, found[axis]) for axis in MESH_AXES if axis in found),
        stage,
    )
    _check(spec, words, text)
    return spec


def parse_layouts(text: str | Iterable[str], *, zero_ranks: int = 2) -> tuple[LayoutSpec, ...]:
    """Read several layouts, separated by commas or given one by one.

    Raises:
        ConfigurationError: There is none, or one is not valid.
    """
    written = text.split(",") if isinstance(text, str) else [part for each in text for part in each.split(",")]
    specs = tuple(parse_layout(each, zero_ranks=zero_ranks) for each in written if each.strip())
    if not specs:
        raise ConfigurationError(f"Layouts are separated by commas; got {text!r}. Name one or more: {LAYOUT_HELP}.")
    return specs


def _words(text: str) -> list[tuple[str, list[int]]]:
    """Return the words of a layout, each with its numbers."""
    found: list[tuple[str, list[int]]] = []
    for piece in "".join(text.lower().split()).split("x"):
        if found and piece.isdecimal():
            found[-1][1].append(int(piece))
            continue
        match = _WORD.fullmatch(piece)
        if match is None or match[1] not in _AXES:
            raise ConfigurationError(
                f"A layout is made of the words {', '.join(_AXES)}, each with its sizes; got {piece!r} in {text!r}."
                f"{meant(piece.rstrip('0123456789'), _AXES)} Write for example {LAYOUT_HELP}."
            )
        found.append((match[1], [int(match[2])] if match[2] else []))
    return found


def _engine(words: list[str], sizes: dict[str, int]) -> str:
    """Return the name of the strategy that trains so."""
    if "zero" in words:
        return "deepspeed"
    if "dp_shard" in sizes:
        return "fsdp"
    if any(sizes.get(axis, 1) > 1 for axis in ("cp", "ep", "pp", "sp", "tp")):
        return "mesh"
    return "ddp" if sizes.get("dp_replicate", 1) > 1 else "single"


def _check(spec: LayoutSpec, words: list[str], text: str) -> None:
    """Refuse axes that no engine combines."""
    if spec.zero_stage is not None and spec.zero_stage not in _STAGES:
        raise ConfigurationError(
            f"ZeRO has the stages 1, 2 and 3; got {spec.zero_stage} in {text!r}. Write the stage first: zero3x2."
        )
    combinable = {"zero", "sp"}
    if ("zero" in words and set(words) - combinable) or ("sp" in words and "zero" not in words):
        raise ConfigurationError(
            f"ZeRO combines with sp, and sp with ZeRO alone; got {text!r}. Write for example zero3x2xsp2, or fsdp and "
            "cp instead."
        )
