"""Runs a script as one rank and writes down, after every optimizer step, what its state is.

    python -m accel_verify.resume.recorder RECORD FIRST LAST SAVE LOAD PROJECT SCRIPT [ARGUMENTS]

Generators are seeded first, in a run that resumes with another seed: what a script draws without one is then the same
before the interruption, and something else after it, as where a user resumes. Its own seeds override that.
Deterministic kernels are chosen where torch has them. It ends the script after step LAST, saving the state into SAVE
unless that is "-". If LOAD is not "-", that state is loaded when the script first reads a prepared loader.

A script whose checkpoints are named automatically has the folder PROJECT for its project's: it finds there what the
run before the interruption saved and nothing else, and its own folder is left alone. Such a script saves and loads
under the names that it gives; where it has loaded a checkpoint itself, none is loaded for it.

Only digests are written: one line of JSON for each step, and fewer lines than steps where the script ends by itself
before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TextIO

import torch

from accel_core.accelerator import Accelerator
from accel_core.optim.optimizer import AcceleratedOptimizer
from accel_core.random import set_seed
from accel_verify.digests import digest, random_states
from accel_verify.parallel.draws import DrawWatch
from accel_verify.recorder import Finished, Recorder, run_target

NOTHING = "-"
_SEED = 3_141_592_653  # one that no script chooses, of 32 bits


class ResumeRecorder(Recorder):
    """Writes down the state after each step."""

    def __init__(self, record: TextIO, first: int, last: int, save: str, load: str, project: str) -> None:
        super().__init__(record)
        self.step = first
        self._last, self._save, self._load, self._project = last, save, load, project
        self._batches: list[str] = []
        self._moved = False  # whether an optimizer has stepped since the last line
        self._draws = DrawWatch()

    def install(self, **members: Callable[..., object]) -> None:
        """Hook into what draws random numbers as well."""
        self._draws.install()
        super().install(load_state=self._loaded, **members)

    def _loaded(self, load: Callable[..., object], *args: object, **kwargs: object) -> object:
        found = load(*args, **kwargs)
        self._load = NOTHING  # the script restored its state itself
        return found

    def begin(self, accelerator: Accelerator) -> None:
        """Give a project whose checkpoints are named a folder of its own."""
        project = accelerator.project_configuration
        if project.automatic_checkpoint_naming:
            if project.logging_dir == project.project_dir:  # it follows, as where the script left it unset
                logs = os.path.dirname(self._record.name)  # where the project goes to a store
                project.logging_dir = logs if "://" in self._project else self._project
            project.project_dir = self._project

    def read(self, begin: Callable[..., Iterator[Any]], loader: object) -> Iterator[object]:
        """Note batches; load the state before the first one, and write a line after a step."""
        if self._load != NOTHING and self.accelerator is not None:
            automatic = self.accelerator.project_configuration.automatic_checkpoint_naming
            self.accelerator.load_state(None if automatic else self._load)
        for batch in begin(loader):
            self._batches.append(digest(batch))
            yield batch
            self._boundary()

    def stepped(self, step: Callable[..., object], optimizer: AcceleratedOptimizer, closure: object = None) -> object:
        """Note that a batch ended in a step."""
        found = step(optimizer, closure)
        self._moved |= optimizer.gradient_state.sync_gradients and not optimizer.step_was_skipped
        return found

    def _boundary(self) -> None:
        """Write a line if the batch that was just processed ended in an optimizer step; stop after the last."""
        accelerator = self.accelerator
        if accelerator is None or not self._moved:
            return
        self._moved = False
        self.step += 1
        # Whether loading moves loaders, or leaves it to the script to skip batches.
        restores = accelerator.use_stateful_dataloader or accelerator.dataloader_config.restores_position
        facts = {"restores": restores, "unseeded": self._draws.unseeded}
        self.write(step=self.step, **facts, **self._state(accelerator))
        self._batches.clear()
        if self.step >= self._last:
            if self._save != NOTHING:
                automatic = accelerator.project_configuration.automatic_checkpoint_naming
                accelerator.save_state(None if automatic else self._save)
            accelerator.wait_for_everyone()  # a rank that ends now would take the save of others with it
            raise Finished(0)

    def _state(self, accelerator: Accelerator) -> dict[str, Any]:
        return {
            "data order": dict(enumerate(self._batches)),
            "learning rate": {
                f"optimizer {number} group {index}": float(group["lr"])
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
                **random_states(),
                "device": digest(accelerator._runtime.world.hardware.rng_state()),
            },
        }


def main(arguments: list[str]) -> None:
    """Run the script as it would run by itself."""
    record, first, last, save, load, project, script, *rest = arguments
    with open(record, "w") as file:
        torch.use_deterministic_algorithms(True, warn_only=True)  # kernels of GPUs that add in one order
        set_seed(_SEED + int(first))
        recorder = ResumeRecorder(file, int(first), int(last), save, load, project)
        recorder.install()
        with suppress(Finished):
            run_target(script, rest)


if __name__ == "__main__":
    main(sys.argv[1:])
