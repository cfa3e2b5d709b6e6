"""What a command of `accel` is, and how other distributions bring their own.

A command is any object with four attributes: `name`, `help`, `add_arguments` and `run`. Built-in commands are instances of
`Command`; a distribution that does not depend on accel-launch offers a module, or any object, of the same shape under the
entry-point group `accel.commands`:

    [project.entry-points."accel.commands"]
    estimate-memory = "accel_bigmodel.estimate_command"

    # accel_bigmodel/estimate_command.py, imported as soon as the command is named, so torch-free
    name = "estimate-memory"
    help = "Say how much memory a model needs to run and to train."
    run = "accel_bigmodel.estimate:run"     # imported when the command really runs; a function works too

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("model_name")

The entry point's name is the word typed after `accel`. Underscore spellings of long options are accepted everywhere:
write `--trust-remote-code` once. `run(args)` returns the exit status (None means 0) and lets `accel_core.errors.AccelError`
through: the command line prints the message and ends with status 2 for a wrong argument or configuration, 1 otherwise.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, runtime_checkable

from accel_core.errors import ConfigurationError

__all__ = ["ENTRY_POINT_GROUP", "AnyCommand", "Command", "Runner", "contributed", "load_contributed", "resolve_runner"]

ENTRY_POINT_GROUP = "accel.commands"
"""Entry-point group under which other distributions offer commands."""

Runner = Callable[[argparse.Namespace], int | None]
"""A function that carries a command out and returns its exit status."""


@runtime_checkable
class AnyCommand(Protocol):
    """The shape of a command: an object or a module with these four attributes."""

    @property
    def name(self) -> str:
        """The word typed after `accel`."""

    @property
    def help(self) -> str:
        """One sentence for the list of commands."""

    @property
    def add_arguments(self) -> Callable[[argparse.ArgumentParser], None]:
        """A function that declares the command's options on an empty parser."""

    @property
    def run(self) -> str | Runner:
        """The function that carries the command out, or where it is, as "module:function"."""


@dataclass(frozen=True)
class Command:
    """A command of `accel`, torch-free until it runs.

    Attributes:
        name: The word typed after `accel`.
        help: One sentence for the list of commands.
        add_arguments: Declares the options on an empty parser.
        run: Carries the command out; "module:function" delays that import until then.
        epilog: Text below the options in the command's help: examples, files, environment.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: str | Runner
    epilog: str | None = None


def contributed() -> dict[str, EntryPoint]:
    """Find the commands that other distributions offer, without importing them.

    Returns:
        The entry point of each command by its name.
    """
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def load_contributed(name: str, point: EntryPoint) -> AnyCommand:
    """Import a command that another distribution offers.

    Args:
        name: The word typed after `accel`.
        point: The entry point found for it.

    Returns:
        The command.

    Raises:
        ConfigurationError: The entry point leads to something that has not the shape of a command.
    """
    found: Any = point.load()
    if not isinstance(found, AnyCommand):
        raise ConfigurationError(
            f"The entry point of the command `{name}` is not a command; `{point.value}` gives a {type(found).__name__} "
            "without all of name, help, add_arguments and run. Update or uninstall the package that offers it."
        )
    return found


def resolve_runner(command: AnyCommand) -> Runner:
    """Return the function that carries a command out, importing it if it was given by its place.

    Args:
        command: A built-in or contributed command.

    Returns:
        The function to call with the parsed arguments.
    """
    run = command.run
    if not isinstance(run, str):
        return run
    module, _, function = run.partition(":")
    runner: Runner = getattr(import_module(module), function)
    return runner
