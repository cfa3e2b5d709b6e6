"""The layouts that `accel verify-parallel` knows by name, and what each asks of `accel launch`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from accel_core.errors import ConfigurationError
from accel_core.mesh.layout import DATA_AXES

__all__ = ["EXAMPLES", "LayoutAsked", "layouts_named", "parse_layout"]

EXAMPLES = ("dp2", "fsdp2", "hsdp2x2", "tp2", "cp2", "fsdp2xtp2", "fsdp2xcp2", "dp2xtp2", "hsdp2x2xtp2", "zero3")
"""One of each kind, for messages."""

_AXES = {"dp": "dp_replicate", "fsdp": "dp_shard", "cp": "cp", "tp": "tp"}
_ZERO_STAGES = (1, 2, 3)
_ZERO_RANKS = 2


@dataclass(frozen=True)
class LayoutAsked:
    """A layout that was named.

    Attributes:
        name: As it was written.
        ranks: Number of processes.
        parts: Into how many parts the data is split.
        words: Flags of `accel launch` that ask for it.
    """

    name: str
    ranks: int
    parts: int
    words: tuple[str, ...]


def layouts_named(text: str, most: int) -> list[LayoutAsked]:
    """Read a comma-separated list of names.

    Args:
        text: The list.
        most: Number of processes that this machine may run.

    Raises:
        ConfigurationError: A name is unknown or comes twice, none is there, or one needs more processes.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigurationError(
            f"There is no layout to verify; got {text!r}. Name some, as in --layouts dp2,fsdp2; known are "
            f"{', '.join(EXAMPLES)} and the like."
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigurationError(f"Each layout is verified once; got {twice} twice. Name it once.")
    found = [parse_layout(name) for name in names]
    for layout in found:
        if layout.ranks > most:
            raise ConfigurationError(
                f"The layout {layout.name} needs {layout.ranks} processes, and this run may start {most}; got "
                f"--layouts {text}. Leave it out, or raise --max-processes (with --cpu, any number fits)."
            )
    return found


def parse_layout(name: str) -> LayoutAsked:
    """Return the layout with a name.

    Args:
        name: Kinds with their sizes, joined by `x`: `dp2` copies, `fsdp2` shards, `hsdp2x2` two copies of two shards,
            `tp2` tensor parallel, `cp2` context parallel, `fsdp2xtp2` … and `zero3`, stage 3 of DeepSpeed on 2 ranks
            (`zero3x4` on 4).

    Raises:
        ConfigurationError: There is no such layout.
    """
    zero = re.fullmatch(r"zero(\d)(?:x(\d+))?", name)
    if zero is not None and int(zero[1]) in _ZERO_STAGES and int(zero[2] or _ZERO_RANKS) > 1:
        return _zero(name, int(zero[1]), int(zero[2] or _ZERO_RANKS))
    sizes = _sizes(name)
    if sizes is None or min(sizes.values()) < 2:
        raise _unknown(name)
    return _mesh(name, sizes)


def _sizes(name: str) -> dict[str, int] | None:
    """Return the size of each axis that a name speaks of; `None` where it cannot be read."""
    hybrid = re.match(r"hsdp(\d+)x(\d+)(?=x|$)", name)
    sizes = {} if hybrid is None else {"dp_replicate": int(hybrid[1]), "dp_shard": int(hybrid[2])}
    rest = name if hybrid is None else name[hybrid.end() :].removeprefix("x")
    for word in rest.split("x") if rest else []:
        read = re.fullmatch(r"([a-z]+)(\d+)", word)
        axis = _AXES.get(read[1]) if read is not None else None
        if read is None or axis is None or axis in sizes:
            return None
        sizes[axis] = int(read[2])
    return sizes or None


def _unknown(name: str) -> ConfigurationError:
    known = sorted({*EXAMPLES, *(f"{kind}{size}" for kind in ("dp", "fsdp", "tp", "cp") for size in (2, 4))})
    known += [f"zero{stage}" for stage in _ZERO_STAGES[:-1]]
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else "Join kinds with their sizes by x, as in fsdp2xtp2."
    return ConfigurationError(
        f"A layout is named by kinds and sizes of at least 2, such as {', '.join(EXAMPLES)}; got {name!r}. {hint}"
    )


def _zero(name: str, stage: int, ranks: int) -> LayoutAsked:
    words = ["--use-deepspeed", "--zero-stage", str(stage), "--num-processes", str(ranks)]
    words += ["--zero3-save-16bit-model", "true"] if stage == max(_ZERO_STAGES) else []
    return LayoutAsked(name, ranks, ranks, tuple(words))


def _mesh(name: str, sizes: Mapping[str, int]) -> LayoutAsked:
    ranks = math.prod(sizes.values())
    parts = math.prod(sizes.get(axis, 1) for axis in DATA_AXES)
    words: Sequence[str] = ["--num-processes", str(ranks)]
    if "dp_shard" in sizes or ("cp" in sizes and "tp" in sizes):
        words = [*words, "--use-fsdp", "--fsdp-version", "2"]
    if set(sizes) - {"dp_shard"} and sizes.keys() != {"dp_replicate"}:
        words = [*words, "--use-parallelism-config"]
        for axis, size in sizes.items():
            words = [*words, f"--parallelism-config-{axis.replace('_', '-')}-size", str(size)]
    return LayoutAsked(name, ranks, parts, tuple(words))
