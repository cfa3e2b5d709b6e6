"""A progress bar that shows on one process of each machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_core.host.availability import has_module
from accel_core.process import rendezvous, world

T = TypeVar("T")
_bars: list[Any] = []
"""The bar of bytes that is shown."""


def tqdm(*args: object, main_process_only: bool = True, **kwargs: object) -> Any:
    """Make a progress bar, by default on the first process of each machine alone.

    The bar of a prepared loader that goes on inside an epoch begins at the steps that were done before.

    Args:
        *args: What `tqdm.auto.tqdm` takes: usually an iterable.
        main_process_only: Show the bar on the first process of each machine; otherwise on all.
        **kwargs: What `tqdm.auto.tqdm` takes; `disable=True` hides the bar everywhere.

    Returns:
        A `tqdm.auto.tqdm`.

    Raises:
        ConfigurationError: The first argument is `True` or `False`.
        MissingDependencyError: tqdm is not installed.

    Examples:
        >>> for images, labels in tqdm(loader, desc="epoch 1"):
        ...     scores = model(images)
    """
    try:
        from tqdm.auto import tqdm as bar
    except ImportError as error:
        raise MissingDependencyError(
            "A progress bar needs the library tqdm, which is not installed. Run `pip install tqdm`."
        ) from error
    if args and isinstance(args[0], bool):
        raise ConfigurationError(
            f"The first argument of tqdm is an iterable; got {args[0]}. "
            "Say which processes show the bar with main_process_only=..."
        )
    disable = kwargs.pop("disable", False)
    if main_process_only and not disable:
        disable = (world.current() or rendezvous.locate()).local_rank != 0
    kwargs.setdefault("initial", getattr(args[0] if args else kwargs.get("iterable"), "steps_done", 0))
    make: Callable[..., Any] = bar
    return make(*args, **kwargs, disable=disable)


def on_terminal(items: Collection[T], doing: str) -> Iterable[T]:
    """Return the items with a bar, where they take over a second, this is a terminal and tqdm is installed."""
    bars = _on_terminal({"iterable": items, "desc": doing, "unit": " weights"}) if len(items) > 1 else []
    return bars[0] if bars else items


def _on_terminal(settings: Mapping[str, Any]) -> list[Any]:
    """Return a bar that shows after a second; nothing elsewhere than on a terminal, and without tqdm."""
    if sys.stderr is None or not sys.stderr.isatty() or not has_module("tqdm"):
        return []
    return [tqdm(**settings, leave=False, delay=1.0)]


@contextmanager
def byte_bar(doing: str) -> Iterator[None]:
    """Show one bar for all bytes of checkpoints that the block writes, or reads to compare them."""
    _bars[:] = _on_terminal({"desc": doing, "unit": "B", "unit_scale": True, "unit_divisor": 1024})
    try:
        yield
    finally:
        while _bars:
            _bars.pop().close()


def moved(nbytes: int, total: int | None = None) -> None:
    """Move the bar of bytes on, if one is shown; `total` says how many there will be."""
    for bar in _bars:
        bar.total = total or bar.total
        bar.update(nbytes)
