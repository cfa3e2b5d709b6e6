"""What an experiment tracker is: the class that every adapter, ours or a third party's, extends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from accel_core.errors import TrackerInterfaceError
from accel_core.host import environ
from accel_core.process.world import current

_F = TypeVar("_F", bound=Callable[..., Any])

_REQUIRED = ("name", "requires_logging_directory", "tracker")


class GeneralTracker:
    """Adapter between a run and one experiment tracker.

    Called in this order, all from one thread of its own: `start`, `store_init_configuration` once, `log` and its
    relatives as often as the run wants, `finish` once; `load_state_dict` when a run is resumed, before or after
    `start`. A subclass has to give `name`, `requires_logging_directory` and `tracker` (the library's own run object),
    and may give `log_images`, `log_table` and `log_artifact` where its library has them.

    An adapter may raise whatever it likes: the hub that calls it decides what becomes of the error.

    Attributes:
        name: Name under which users ask for it in `log_with`.
        requires_logging_directory: Whether its first arguments are a run name and a folder to write to.
        main_process_only: Whether methods marked with `on_main_process` do nothing on the other ranks.
        fills_step: Whether a call without a step is given the run's next one, for libraries that cannot count.
        libraries: Importable modules of which one has to be installed, with what to install it by.
        starts_on_caller: Whether `start` runs in the thread that called, for libraries that bind a run to a thread.

    Args:
        _blank: Skip the check for the required attributes.

    Raises:
        TrackerInterfaceError: A required attribute is missing.

    Examples:
        >>> class Printer(GeneralTracker):
        ...     name = "printer"
        ...     requires_logging_directory = False
        ...     tracker = None
        ...     def log(self, values, step=None, **kwargs):
        ...         print(step, values)
        >>> accelerator = Accelerator(log_with=Printer())
        >>> accelerator.init_trackers("digits")
        >>> accelerator.log({"loss": 0.5}, step=1)
        >>> accelerator.end_training()
        1 {'loss': 0.5}
    """

    main_process_only: bool = True
    fills_step: ClassVar[bool] = False
    libraries: ClassVar[tuple[str, ...]] = ()
    starts_on_caller: ClassVar[bool] = False

    if TYPE_CHECKING:

        @property
        def name(self) -> str:
            """Name under which users ask for it."""

        @property
        def requires_logging_directory(self) -> bool:
            """Whether it writes to a folder."""

        @property
        def tracker(self) -> Any:
            """The library's own run object."""

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        missing = [name for name in _REQUIRED if not hasattr(type(self), name) and name not in vars(self)]
        if missing:
            raise TrackerInterfaceError(
                f"The tracker {type(self).__name__} lacks attributes that every tracker has; missing are "
                f"{', '.join(missing)}. Define them in the class, or set them before `super().__init__()`."
            )

    def start(self) -> None:
        """Open the run in the library; the constructor only keeps its arguments."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration of the run.

        Args:
            values: Any nesting of anything; `accel_trackers.flatten` makes a table of it.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Store values at a step.

        Args:
            values: Numbers, texts, or mappings of numbers, by name.
            step: Number of the step.
            **kwargs: Passed to the library.
        """

    def finish(self) -> None:
        """Close the run; a second call does nothing."""

    def release(self) -> None:
        """Let go of the thread that `start` ran in, where `starts_on_caller`; called in it after `finish`."""

    def state_dict(self) -> dict[str, Any]:
        """Return what another process needs to go on with this run: its id in the library, as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a stored run: before `start` where the run is known by then, else in place of the one it opened.

        Args:
            state: What `state_dict` returned, and `step`: the last step that was logged when it was stored.
        """


def on_main_process(function: _F) -> _F:
    """Make a tracker's method do nothing on ranks other than 0, if the tracker is `main_process_only`."""

    @functools.wraps(function)
    def run(self: object, *args: object, **kwargs: object) -> object:
        if not getattr(self, "main_process_only", False) or _is_main():
            return function(self, *args, **kwargs)
        return None

    return cast("_F", run)


def _is_main() -> bool:
    world = current()
    return world.is_main if world is not None else environ.integer("RANK", 0) == 0
