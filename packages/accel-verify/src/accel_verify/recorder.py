"""What every recorder does: it runs a script as it would run by itself, watches its Accelerator, and writes lines."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from torch import nn

from accel_core.accelerator import Accelerator
from accel_core.data.dispatcher import DataLoaderDispatcher
from accel_core.data.loader import DataLoaderShard, PreparedLoader
from accel_core.optim.optimizer import AcceleratedOptimizer
from accel_verify.patch import wrap

UNSAVED: dict[str, Callable[..., object]] = {
    "save_state": lambda save, accelerator, output_dir=None, *args, **kwargs: output_dir,
    "save_model": lambda *args, **kwargs: None,
    "save": lambda *args, **kwargs: None,
}
"""Members of Accelerator that are disabled where a script runs several times and not to its end."""


class Finished(SystemExit):
    """Ends a script that would continue to train."""


class Recorder:
    """Watches the Accelerator of a script, its prepared loaders and optimizers.

    Args:
        record: What lines are written to.
    """

    accelerator: Accelerator | None = None  # the one that the script has made last

    def __init__(self, record: TextIO) -> None:
        self._record = record
        self.step = 0  # optimizer steps so far

    def install(self, **members: Callable[..., object]) -> None:
        """Put this recorder around members of Accelerator, and of what it prepares."""
        members |= {"__init__": self._begun, "prepare_model": self._prepared}
        for name, around in members.items():
            wrap(Accelerator, name, around)
        wrap(AcceleratedOptimizer, "step", self.stepped)
        for kind in (DataLoaderShard, DataLoaderDispatcher):
            wrap(kind, "__iter__", self.read)

    def write(self, **facts: object) -> None:
        """Write a line of the record."""
        self._record.write(json.dumps(facts) + "\n")
        self._record.flush()  # a rank that is killed leaves what it has written

    def _begun(self, begin: Callable[..., None], accelerator: Accelerator, *args: object, **kwargs: object) -> None:
        begin(accelerator, *args, **kwargs)
        self.begin(accelerator)
        self.accelerator = accelerator

    def _prepared(self, prepare: Callable[..., nn.Module], *args: object, **kwargs: object) -> nn.Module:
        model = prepare(*args, **kwargs)
        self.watch(model)
        return model

    def begin(self, accelerator: Accelerator) -> None:
        """See an Accelerator that was made."""

    def watch(self, model: nn.Module) -> None:
        """See a model that was prepared."""

    def stepped(self, step: Callable[..., object], optimizer: AcceleratedOptimizer, closure: object = None) -> object:
        """See a call of an optimizer's step."""
        return step(optimizer, closure)

    def read(self, begin: Callable[..., Iterator[Any]], loader: PreparedLoader) -> Iterator[object]:
        """See the batches of an iteration, which `begin(loader)` begins."""
        yield from begin(loader)


def run_target(target: str, arguments: list[str]) -> None:
    """Run a script as it would run by itself, or a function of it."""
    script, _, function = target.partition(".py:")
    script += ".py" if function else ""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))  # as Python does for a script
    if not function:
        runpy.run_path(script, run_name="__main__")
        return
    runpy.run_path(script, run_name="verified")[function]()
