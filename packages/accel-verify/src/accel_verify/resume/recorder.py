"""Runs a script as one rank and writes down, after every optimizer step, what its state is.

    python -m accel_verify.resume.recorder RECORD FIRST LAST SAVE LOAD PROJECT SCRIPT [ARGUMENTS]

Generators are seeded first, so that a script that leaves one of them unseeded is repeatable; its own seeds override
that. Deterministic kernels are chosen where torch has them. It ends the script after step LAST, saving the state into
SAVE unless that is "-". If LOAD is not "-", that state is loaded when the script first reads a prepared loader.

A script whose checkpoints are named automatically has the folder PROJECT for its project's: it finds there what the
run before the interruption saved and nothing else, and its own folder is left alone. Such a script saves and loads
under the names that it gives; where it has loaded a checkpoint itself, none is loaded for it.

Only digests are written: one line of JSON for each step, and fewer lines than steps where the script ends by itself
before.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import importlib
import importlib.util
import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TextIO

import torch
from torch import Tensor

from accel_core.accelerator import Accelerator
from accel_core.checkpoint.tensor_file import buffer_of
from accel_core.data.dispatcher import DataLoaderDispatcher
from accel_core.data.loader import DataLoaderShard
from accel_core.plugins.project import ProjectConfiguration
from accel_verify.parallel.recorder import Finished, run_target
from accel_verify.patch import wrap

__all__ = ["ResumeRecorder", "main"]

NOTHING = "-"


class ResumeRecorder:
    """Watches the Accelerator of a script."""

    def __init__(self, record: TextIO, first: int, last: int, save: str, load: str, project: str) -> None:
        self.step = first
        self._record = record
        self._last, self._save, self._load, self._project = last, save, load, project
        self._accelerator: Accelerator | None = None
        self._batches: list[str] = []
        self._written = first

    def install(self) -> None:
        """Hook into Accelerator and prepared loaders."""
        wrap(Accelerator, "__init__", self._begun)
        wrap(Accelerator, "load_state", self._loaded)
        for kind in (DataLoaderShard, DataLoaderDispatcher):
            wrap(kind, "__iter__", self._watched)

    def _begun(self, begin: Callable[..., None], accelerator: Accelerator, *args: object, **kwargs: object) -> None:
        begin(accelerator, *args, **kwargs)
        self._accelerator = accelerator
        self._move(accelerator.project_configuration)

    def _loaded(self, load: Callable[..., object], *args: object, **kwargs: object) -> object:
        found = load(*args, **kwargs)
        self._load = NOTHING  # the script restored its state itself
        return found

    def _move(self, project: ProjectConfiguration) -> None:
        if project.automatic_checkpoint_naming:
            if project.logging_dir == project.project_dir:  # it follows, as where the script left it unset
                logs = os.path.dirname(self._record.name)  # where the project goes to a store
                project.logging_dir = logs if "://" in self._project else self._project
            project.project_dir = self._project

    def _watched(self, begin: Callable[[object], Iterator[object]], loader: object) -> Iterator[object]:
        self._begin()
        for batch in begin(loader):
            self._batches.append(digest(batch))
            steps = self._steps_done()
            yield batch
            self._boundary(steps)

    def _begin(self) -> None:
        if self._load != NOTHING and self._accelerator is not None:
            automatic = self._accelerator.project_configuration.automatic_checkpoint_naming
            self._accelerator.load_state(None if automatic else self._load)

    def _steps_done(self) -> int:
        accelerator = self._accelerator
        return 0 if accelerator is None or not accelerator._optimizers else _count(accelerator._optimizers[0])

    def _boundary(self, before: int) -> None:
        """Write a line if the batch that was just processed ended in an optimizer step; stop after the last."""
        accelerator = self._accelerator
        if accelerator is None or self._steps_done() == before:
            return
        self.step += 1
        line = {"step": self.step, "restores": _restores_position(accelerator), **self._state(accelerator)}
        self._record.write(json.dumps(line) + "\n")
        self._record.flush()
        self._batches.clear()
        if self.step >= self._last:
            if self._save != NOTHING:
                automatic = accelerator.project_configuration.automatic_checkpoint_naming
                accelerator.save_state(None if automatic else self._save)
            accelerator.wait_for_everyone()  # a rank that ends now would take the save of others with it
            raise Finished(0)

    def _state(self, accelerator: Accelerator) -> dict[str, Any]:
        numpy = sys.modules.get("numpy")
        return {
            "data order": dict(enumerate(self._batches)),
            "learning rate": {
                f"optimizer {number} group {index}": group["lr"]
                if not isinstance(group["lr"], Tensor)
                else float(group["lr"])
                for number, optimizer in enumerate(accelerator._optimizers)
                for index, group in enumerate(optimizer.param_groups)
            },
            "parameters": {
                f"model {number} {name}": digest(value)
                for number, model in enumerate(accelerator._models)
                for name, value in accelerator.get_state_dict(model).items()
            },
            "optimizer": {
                f"optimizer {number} parameter {key} {name}": digest(value)
                for number, optimizer in enumerate(accelerator._optimizers)
                for key, entries in optimizer.state_dict()["state"].items()
                for name, value in entries.items()
            },
            "random states": {
                "torch": digest(torch.get_rng_state()),
                "device": digest(accelerator._runtime.world.hardware.rng_state()),
                "Python": digest(random.getstate()),
                "NumPy": digest(numpy.random.get_state()) if numpy is not None else "",
            },
        }


def _restores_position(accelerator: Accelerator) -> bool:
    """Return whether loading moves loaders, or leaves it to the script to skip batches."""
    return accelerator.use_stateful_dataloader or accelerator.dataloader_config.restores_position


def _seed() -> None:
    """Seed every generator, because the question is only whether a script resumes, not whether it is repeatable.

    Kernels of GPUs that add in any order are left out for the same reason, where torch has others.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    random.seed(0)
    torch.manual_seed(0)
    if importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy").random.seed(0)


def _count(optimizer: Any) -> int:
    """Return how often an optimizer really stepped, counting from now on at the first call."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not hasattr(inner, "_accel_steps"):
        inner._accel_steps = 0

        def counted(*_: object) -> None:
            inner._accel_steps += 1

        inner.register_step_post_hook(counted)  # steps inside an accumulation window do not reach it
    return int(inner._accel_steps)


def digest(value: object) -> str:
    """Return a checksum of what a nest holds: bytes of tensors and arrays, the text of anything else."""
    state = hashlib.blake2b(digest_size=8)
    for leaf in _leaves(value):
        if isinstance(leaf, Tensor):
            plain = leaf.detach().to("cpu").contiguous()
            state.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
            state.update(buffer_of(plain))
        else:
            state.update(re.sub(r" at 0x[0-9a-f]+", "", f"{leaf!r},").encode())  # the address says nothing
    return state.hexdigest()


def _leaves(value: Any, above: tuple[object, ...] = ()) -> Iterator[object]:
    if any(value is each for each in above):
        return
    above = (*above, value)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _leaves(inner, above)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner, above)
    elif type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        # The text of an array leaves out digits, and most elements of a large one.
        yield from (value.dtype.str, value.shape, value.tolist())
    elif isinstance(value, (Tensor, type, enum.Enum)):
        yield value
    elif dataclasses.is_dataclass(value):  # whose fields may be in slots
        yield from _leaves([getattr(value, field.name) for field in dataclasses.fields(value)], above)
    elif getattr(value, "__dict__", None):
        yield type(value).__qualname__
        yield from _leaves(vars(value), above)
    else:
        yield value


def main(arguments: list[str]) -> None:
    """Run the script as it would run by itself."""
    record, first, last, save, load, project, script, *rest = arguments
    with open(record, "w") as file:
        recorder = ResumeRecorder(file, int(first), int(last), save, load, project)
        recorder.install()
        _seed()
        with suppress(Finished):
            run_target(script, rest)


if __name__ == "__main__":
    main(sys.argv[1:])
