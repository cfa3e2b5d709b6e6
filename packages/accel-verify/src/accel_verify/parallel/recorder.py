"""Runs a script as one rank and writes down what happens in each of its first optimizer steps.

    python -m accel_verify.parallel.recorder FOLDER STEPS PARTS COUNTS TARGET [ARGUMENTS]

PARTS is 0 on the ranks of a layout. One process that stands beside a layout gets the number of parts into which that
splits the data, and reads them all; with COUNTS 1 its `num_processes` says that number. FOLDER gets `RANK.jsonl`, and
from rank 0 the whole gradients and weights of each step as `STEP-gradients.pt` and `STEP-weights.pt`.

After the last step nothing is trained: a loader that is trained with gives no more batches, so the script goes on to
its evaluation and to its end. Nothing is saved and no tracker is started, and what fails after the last step is a note.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accel_core import errors
from accel_core.accelerator import Accelerator
from accel_core.comm.tree import tree_leaves
from accel_core.data.loader import PreparedLoader
from accel_core.devices.memory import peak_memory
from accel_core.host import environ
from accel_core.mesh.layout import GROUPS
from accel_core.mesh.tensor import local_part, whole
from accel_core.optim.optimizer import AcceleratedOptimizer
from accel_verify.parallel.draws import DrawWatch
from accel_verify.parallel.forward import ForwardWatch
from accel_verify.parallel.one_process import read_for_all
from accel_verify.parallel.values import gradients, row_digests, sketch, weights
from accel_verify.recorder import UNSAVED, Finished, Recorder, run_target

REFUSALS = (
    *(errors.ConfigurationError, errors.DataError, errors.DeviceUnavailableError, errors.EngineUnavailableError),
    *(errors.MissingDependencyError, errors.PreparationError, errors.StateError),
)
"""Errors by which a strategy says that it cannot train this script."""

_EMPTY_EPOCHS = 1000
"""How often a script may begin an epoch after the last step: one that counts steps would do so forever."""


class StepRecorder(Recorder):
    """Writes down what happens in each step."""

    def __init__(
        self, record: TextIO, rank: int, folder: Path, steps: int, parts: int, *, counts: bool = False
    ) -> None:
        super().__init__(record)
        self.steps, self._parts, self._counts = steps, parts, counts
        self._folder, self._rank = folder, rank
        self._forward, self._draw_watch = ForwardWatch(), DrawWatch(self._draws_count)
        self._losses: list[tuple[float, float | None]] = []
        self._rows: list[list[str]] = []
        self._gradients: dict[str, tuple[float, str]] | None = None
        self._strays: dict[str, tuple[float, str]] = {}
        self._clipped: float | None = None
        self._trained_with: list[object] = []
        self._reading: list[object] = []
        self._empty_epochs = 0
        self._gathering = False

    def install(self, **members: Callable[..., object]) -> None:
        """Hook into torch's own functions as well."""
        self._forward.install()
        self._draw_watch.install()
        if self._parts:
            read_for_all(self._parts, counts=self._counts)
        super().install(
            backward=self._backward,
            clip_grad_norm_=self._clip,
            clip_grad_value_=self._clip,
            gather_for_metrics=functools.partial(self._gathered, "gather_for_metrics"),
            gather=functools.partial(self._gathered, "gather"),
            **UNSAVED,
            **members,
        )
        register_optimizer_step_pre_hook(self._note_stray)

    def end(self, error: BaseException | None) -> None:
        """Write the last line."""
        device = torch.device("cpu") if self.accelerator is None else self.accelerator.device
        note = None if error is None or isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
        refused = isinstance(error, REFUSALS) and self.step < self.steps
        facts = {"memory": peak_memory(device), "note": note, "refused": refused}
        self.write(kind="end", steps=self.step, **facts)

    def begin(self, accelerator: Accelerator) -> None:
        """Write down which rank does what."""
        accelerator.log_with = []
        if self.accelerator is None:
            layout = accelerator._runtime.layout
            shares = [layout.place((*GROUPS["dp_cp"], "sp"), rank) for rank in range(layout.world_size)]
            facts = {"parts": layout.parts, "loss_parts": shares, "cut": layout.size("sp") > 1}
            self.write(kind="run", **facts, precision=accelerator.mixed_precision)

    def watch(self, model: nn.Module) -> None:
        """Note what the modules of a model return in the first batch."""
        if self.step == 0:
            self._forward.watch(model)

    def _backward(
        self,
        backward: Callable[..., None],
        accelerator: Accelerator,
        loss: object,
        *,
        weight: float | Tensor | None = None,
        **kwargs: object,
    ) -> None:
        value = float(whole(loss.detach()).double()) if isinstance(loss, Tensor) else math.nan
        self._losses.append((value, None if weight is None else float(weight)))
        self._forward.backward_begins(accelerator._models)
        backward(accelerator, loss, weight=weight, **kwargs)
        self._forward.backward_ended()

    def _clip(
        self, clip: Callable[..., Tensor | None], accelerator: Accelerator, *args: object, **kwargs: object
    ) -> Tensor | None:
        self._take_gradients(accelerator)
        norm = clip(accelerator, *args, **kwargs)
        if accelerator.sync_gradients and norm is not None:
            self._clipped = float(whole(torch.as_tensor(norm)).double())
        return norm

    def stepped(self, step: Callable[..., object], optimizer: AcceleratedOptimizer, closure: object = None) -> object:
        """Write the step down, or train no more."""
        accelerator = self.accelerator
        if self.step >= self.steps:
            self._trains_on()
            return None
        if accelerator is None or not optimizer.gradient_state.sync_gradients:
            return step(optimizer, closure)
        self._take_gradients(accelerator)
        found = step(optimizer, closure)
        self._write_step(accelerator)
        return found

    def _note_stray(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note the gradients with which an optimizer steps that was not prepared: nobody reduces them."""
        accelerator = self.accelerator
        if accelerator is None or self.step >= self.steps:
            return
        if any(each is optimizer or each.optimizer is optimizer for each in accelerator._optimizers):
            return
        for place, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"]):
            if parameter.grad is not None:
                name = f"parameter {place} of {type(optimizer).__name__}"
                self._strays[name] = sketch(local_part(parameter.grad.detach()).cpu())

    def _take_gradients(self, accelerator: Accelerator) -> None:
        """Write the complete gradients of the window down, once, before anything clips them."""
        if self._gradients is not None or not accelerator.sync_gradients or self.step >= self.steps:
            return
        accelerator.unscale_gradients()  # scaled ones differ by the scale, which each run finds by itself
        if self.step == 0:
            self._keep(0, "weights", weights(accelerator))
        self._gradients = self._keep(self.step + 1, "gradients", gradients(accelerator))

    def _keep(self, step: int, what: str, values: Iterator[tuple[str, Tensor]]) -> dict[str, tuple[float, str]]:
        sketches, kept = {}, {}
        for name, value in values:
            sketches[name] = sketch(value)
            if self._rank == 0:
                kept[name] = value.clone()
        if self._rank == 0:
            torch.save(kept, self._folder / f"{step}-{what}.pt")
        return sketches

    def _write_step(self, accelerator: Accelerator) -> None:
        """Write a step down, and begin the next one."""
        self.step += 1
        self.write(
            kind="step",
            losses=self._losses,
            rows=self._rows,
            gradients=self._gradients,
            strays=self._strays,
            clipped=self._clipped,
            rates=[float(group["lr"]) for each in accelerator._optimizers for group in each.param_groups],
            weights=self._keep(self.step, "weights", weights(accelerator)),
            outputs=self._forward.outputs,
            masks=self._forward.masks,
            seed=self._forward.seed,
            drawn=self._draw_watch.drawn,
            unseeded=self._draw_watch.unseeded,
        )
        self._forward.next_step()
        self._draw_watch.next_step()
        self._losses, self._rows, self._gradients, self._clipped = [], [], None, None
        self._strays = {}
        self._note_loader()

    def _note_loader(self) -> None:
        """Note that the loader that is read is trained with: after the last step it gives no more batches."""
        if self._reading and self._reading[-1] not in self._trained_with:
            self._trained_with.append(self._reading[-1])

    def _trains_on(self) -> None:
        """Skip a step after the last one and end the script; a script without a loader ends here."""
        self._note_loader()
        if not self._reading:
            raise Finished(0)

    def read(self, begin: Callable[..., Any], loader: PreparedLoader) -> Iterator[object]:
        """Note the rows of batches; after the last step there are none of a loader that is trained with."""
        if self.step >= self.steps and loader in self._trained_with:
            self._empty_epochs += 1
            if self._empty_epochs > _EMPTY_EPOCHS:
                raise Finished(0)
            loader.iteration += 1  # by which a script may count
            return
        self._reading.append(loader)
        batches = begin(loader)
        try:
            for batch in batches:
                if self.step < self.steps:
                    self._rows.append(row_digests(batch))
                self._forward.listening = self.step == 0 and not self._losses
                yield batch
                if self.step >= self.steps and loader in self._trained_with:
                    loader.iteration += 1
                    break
        finally:
            batches.close()  # the loader must not stay the active one
            self._reading.remove(loader)

    def _draws_count(self) -> bool:
        """Return whether a model trains in a step that is compared, and this is not its backward pass."""
        models = [] if self.accelerator is None else self.accelerator._models
        trains = self.step < self.steps and any(model.training for model in models)
        return trains and not self._forward.in_backward

    def _gathered(
        self, name: str, gather: Callable[..., object], accelerator: Accelerator, *args: object, **kwargs: object
    ) -> object:
        # What is gathered while a model trains may be asked for where there are several ranks only.
        trains = name == "gather" and any(model.training for model in accelerator._models)
        if self._gathering or trains:  # gather_for_metrics calls gather
            return gather(accelerator, *args, **kwargs)
        self._gathering = True
        try:
            found = gather(accelerator, *args, **kwargs)
        finally:
            self._gathering = False
        given = args[0] if args else next(iter(kwargs.values()))
        self.write(kind="metric", function=name, step=self.step, values=_counted(given, found))
        return found


def _counted(given: object, found: object) -> list[tuple[int, float, bool]]:
    """Return for each gathered tensor its rows, the sum of its elements, and whether it is one value of each rank."""
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    gathered = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
    if len(tensors) != len(gathered):
        return [(len(found) if isinstance(found, list) else 1, 0.0, False)]
    return [
        (len(after) if after.dim() else 1, float(after.double().sum()), _is_one_value(before))
        for before, after in zip(tensors, gathered, strict=True)
    ]


def _is_one_value(tensor: Tensor) -> bool:
    """Return whether a rank gathers one value: a scalar, or one that is repeated for each sample of a full batch."""
    return not tensor.dim() or bool((tensor == tensor[:1]).all())


def main(arguments: list[str]) -> None:
    """Watch a target to its end; raise what it raises before its last step, unless a strategy refuses it."""
    folder, steps, parts, counts, target, *rest = arguments
    rank = environ.integer("RANK", 0) or 0
    with open(Path(folder) / f"{rank}.jsonl", "w") as record:
        recorder = StepRecorder(record, rank, Path(folder), int(steps), int(parts), counts=counts == "1")
        recorder.install()
        try:
            run_target(target, rest)
        except BaseException as error:
            recorder.end(error)
            if recorder.step >= recorder.steps or isinstance(error, Finished):
                return
            if isinstance(error, SystemExit) and not error.code:  # the script's own end
                return
            raise
        recorder.end(None)


if __name__ == "__main__":
    main(sys.argv[1:])
