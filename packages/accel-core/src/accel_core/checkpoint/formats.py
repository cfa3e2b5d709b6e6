"""Which format a checkpoint is in: the first that recognizes what lies in its folder.

The run's own format is asked first, then those that strategies announced, then installed ones (entry-point group
`accel.formats`). So what one strategy saved another can load.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from accel_core.checkpoint import names
from accel_core.checkpoint.format import CheckpointFormat, Source
from accel_core.checkpoint.report import listed
from accel_core.errors import CheckpointMismatchError
from accel_core.host.installed import points_of
from accel_core.options.engines import PUBLIC, load, require

_registered: list[CheckpointFormat | str] = ["accel_core.checkpoint.plain:PLAIN"]


def register_format(chosen: CheckpointFormat | str) -> None:
    """Let checkpoints of a format be recognized, whichever strategy loads them; again changes nothing."""
    if chosen not in _registered:
        _registered.append(chosen)


def recognise(source: Source, own: CheckpointFormat) -> CheckpointFormat:
    """Return the format that a checkpoint is in; the run's own for one that holds no models."""
    for candidate in (own, *_others()):
        if candidate.recognises(source):
            return candidate
    engines = sorted({engine for name in source.files() if (engine := names.engine_of(name))})
    if not engines:
        return own
    for known in PUBLIC:
        if known.title in engines:
            require(known.word, f"a checkpoint of it in {str(source.folder)!r}")
    found = sorted({"".join(name.partition("/")[:2]) for name in source.files()})  # of shards, their folder
    raise CheckpointMismatchError(
        f"No strategy that is installed reads models as they are stored in {str(source.folder)!r}, written by "
        f"{' and '.join(engines)}; got {listed(found)}. Load it with the strategy that saved it, or save whole "
        "weights there and load those."
    )


def _others() -> Iterator[CheckpointFormat]:
    for index, chosen in enumerate(_registered):
        if isinstance(chosen, str):
            _registered[index] = chosen = cast(CheckpointFormat, load(chosen))
        yield chosen
    for place in points_of("accel.formats").values():
        yield cast(CheckpointFormat, load(place))
