"""What a command of `accel` is.

A command is any object with four attributes: `name`, `help`, `add_arguments` and `run`. Built-in commands are
instances of `Command`; a distribution that does not depend on accel-launch offers a module, or any object, of the
same shape under the entry-point group `accel.commands`:

    [project.entry-points."accel.commands"]
    estimate-memory = "accel_bigmodel.estimate_command"

    # accel_bigmodel/estimate_command.py, imported as soon as the command is named, so torch-free
    name = "estimate-memory"
    help = "Estimate how much memory a model needs to run and to train."
    run = "accel_bigmodel.estimate:run"     # imported when the command really runs; a function works too

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("model_name")

The entry point's name is the word typed after `accel`. Underscore spellings of long options are accepted everywhere:
write `--trust-remote-code` once. `run(args)` returns the exit status (None means 0) and lets
`accel_core.errors.AccelError`
through: the command line prints the message and ends with status 2 for a wrong argument or configuration, 1 otherwise.
"""

import argparse
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple, TypeAlias

from accel_launch.imports import load

Runner = Callable[[argparse.Namespace], int | None]
"""A function that carries a command out and returns its exit status."""


class Command(NamedTuple):
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


AnyCommand: TypeAlias = Command | ModuleType
"""A command: one of `Command`, or a module with its four attributes `name`, `help`, `add_arguments` and `run`."""


def resolve_runner(command: AnyCommand) -> Runner:
    """Return the function that carries a command out, importing it if it was given by its place."""
    if not isinstance(command.run, str):
        return command.run
    module, _, function = command.run.partition(":")
    runner: Runner = getattr(load(module), function)
    return runner
