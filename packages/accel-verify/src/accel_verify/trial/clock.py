"""Runs a script on one process for some seconds, and writes down how fast it trains and what memory it needs.

    python -m accel_verify.trial.clock FOLDER LIMIT TARGET [ARGUMENTS]

Nothing else is recorded, so that the clock sees the script as it is. LIMIT is the memory of a GPU in bytes; memory is
predicted for one rank, and for more ranks with shards until it fits. With 0 it is not predicted.
"""

from __future__ import annotations

import copy
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor, nn

from accel_core.accelerator import Accelerator
from accel_core.comm.tree import tree_leaves
from accel_core.errors import AccelError
from accel_core.mesh.spec import parse_layout
from accel_core.optim.optimizer import AcceleratedOptimizer
from accel_verify.recorder import UNSAVED, Finished, Recorder, run_target

_STEPS, _SECONDS = 20, 5.0
_LAYOUTS = ("single", "fsdp2", "fsdp4", "fsdp8")
_STATES = ("momentum", "amsgrad", "nesterov", "centered")
"""Arguments of optimizers that change the number of their states."""

_END: object = object()


class TrainingClock(Recorder):
    """Counts optimizer steps after the first, samples, seconds, and those in which the script waited for batches."""

    def __init__(self, record: TextIO) -> None:
        super().__init__(record)
        self.steps, self.samples, self.waited, self.seconds = -1, 0, 0.0, 0.0  # the first step warms up
        self._began = 0.0
        self._input: Tensor | None = None

    def begin(self, accelerator: Accelerator) -> None:
        """Let nothing be tracked."""
        accelerator.log_with = []

    def watch(self, model: nn.Module) -> None:
        """Note the first input of a model."""

        def note(module: nn.Module, inputs: tuple[object, ...], named: dict[str, object]) -> None:
            # Transformers: the first tensor may be a mask.
            found = [named["input_ids"]] if "input_ids" in named else tree_leaves((inputs, named))
            self._input = next((leaf for leaf in found if isinstance(leaf, Tensor) and leaf.dim()), None)
            seen.remove()  # the first forward pass is enough

        seen = model.register_forward_pre_hook(note, with_kwargs=True)

    def read(self, begin: Callable[..., Iterator[Any]], loader: object) -> Iterator[object]:
        """Count samples, and the seconds in which the script waited for them."""
        batches = begin(loader)
        while True:
            asked = time.perf_counter()
            batch = next(batches, _END)
            self.waited += time.perf_counter() - asked
            if batch is _END:
                return
            rows = (len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
            self.samples += next(rows, 0)
            yield batch

    def stepped(self, step: Callable[..., object], optimizer: AcceleratedOptimizer, closure: object = None) -> object:
        """Count a step, and end the script after some."""
        found = step(optimizer, closure)
        if not optimizer.gradient_state.sync_gradients:
            return found
        self.steps += 1
        if self.steps == 0:
            self._began, self.samples, self.waited = self._now(), 0, 0.0
            return found
        self.seconds = time.perf_counter() - self._began
        if self.steps >= _STEPS or self.seconds > _SECONDS:
            self.seconds = self._now() - self._began
            raise Finished(0)
        return found

    def _now(self) -> float:
        """Return the time at which the device has done what it was given; kernels run later than the script."""
        if self.accelerator is not None:
            self.accelerator._runtime.world.hardware.synchronize()
        return time.perf_counter()

    def memory(self, limit: int) -> tuple[list[dict[str, Any]], str]:
        """Return what a rank needs on each layout up to the first that fits, and why there is none."""
        try:
            prediction: Any = importlib.import_module("accel_plan.training.prediction")
            workload: Any = importlib.import_module("accel_plan.training.workload").TrainingWorkload
        except ImportError:
            return [], "it is predicted by accel-plan; run `pip install 'accel-plan[train]'`"
        accelerator, given = self.accelerator, self._input
        if accelerator is None or given is None or not accelerator._optimizers:
            return [], "no prepared model was trained"
        model = accelerator.unwrap_model(accelerator._models[0], keep_fp32_wrapper=False).to("meta")
        model.zero_grad(set_to_none=True)  # gradients would be copied with the model
        optimizer = accelerator._optimizers[0].optimizer
        known = type(optimizer).__module__.startswith("torch.optim")  # the prediction steps torch's optimizers only
        states = {name: optimizer.defaults[name] for name in _STATES if known and optimizer.defaults.get(name)}
        tokens = not given.is_floating_point() and given.dim() == 2
        shape: dict[str, Any] = {"sequence": given.shape[1]} if tokens else {"sample": tuple(given.shape[1:])}
        name = type(optimizer).__name__ if known else "AdamW"
        shape |= {"precision": accelerator.mixed_precision, "optimizer": name, "optimizer_arguments": states}
        found: list[dict[str, Any]] = []
        for layout in _LAYOUTS:
            spec = parse_layout(layout)
            step = workload(batch=len(given) * spec.layout().replicas, **shape)
            try:
                needed = prediction.predict(lambda: copy.deepcopy(model), spec, step)
            except AccelError as error:
                return found, str(error)
            found.append({"layout": layout, "ranks": needed.ranks, "peak": needed.peak})
            if needed.peak <= limit:
                break
        return found, ""


def main(arguments: list[str]) -> None:
    """Run the target until the clock has seen enough of it, and write down what it saw."""
    folder, limit, target, *rest = arguments
    with open(Path(folder) / "clock.json", "w") as file:
        clock = TrainingClock(file)
        clock.install(**UNSAVED)
        try:
            run_target(target, rest)
        except SystemExit as ended:
            if ended.code:
                raise
        memory, trouble = clock.memory(int(limit)) if int(limit) else ([], "")
        found = {"steps": clock.steps, "samples": clock.samples, "waited": clock.waited, "seconds": clock.seconds}
        clock.write(**found, memory=memory, trouble=trouble)


if __name__ == "__main__":
    main(sys.argv[1:])
