"""A training that counts: each sample has a weight, which says in how many steps it was trained with.

    program.py FOLDER SAMPLES EPOCHS KILLS [fsdp2] [tp] [workers] [slow] [hasty] [brief] [saving] [pausing] [once]
        [fp16] [tracking] [aside] [metered] SLOWNESS

KILLS are `replica:life:step:when`, with commas: rank 0 of a replica kills itself in a life at a step of its own,
`before` its gradients are exchanged, `within` the step behind that, or `behind` the step. With `giving` for the step,
the first replica dies that gives its state to another one behind the start. Beside the counts a small
model is trained, and who trained with which samples in which step is written down, for a plain loop to do the same.
A `hasty` one waits 3 s for others once all have started, and begins where its latest checkpoint is; one that is `brief`
exchanges for 4 s at most, others for 10 s on a quiet machine. One that is `metered` measures its steps. One that is
`tracking` logs each step that is made. One
that is `saving` saves its state every 4 steps, and may be killed at it, or does so `aside`; where they are `pausing`,
the first one stops itself in its first save. One that lives `once` does not come back. Where there is a file `hold`,
the first one waits between two epochs until it is gone.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accel_core.accelerator import Accelerator
from accel_core.checkpoint.save import Transaction
from accel_core.mesh.tensor import whole
from accel_core.plugins.handlers import GradScalerKwargs, MeterKwargs
from accel_core.plugins.project import ProjectConfiguration
from accel_core.tracking.tracker import GeneralTracker
from accel_torchft.kwargs import FaultToleranceKwargs

BATCH, LOOK, PATIENCE = 4, 0.05, 0.5


class Numbers(Dataset[torch.Tensor]):
    """Numbers from 0."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Model(nn.Module):
    """A weight for each sample, and a layer that learns a function of their numbers."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.times = nn.Parameter(torch.zeros(samples, dtype=torch.float64))
        self.layer = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        inputs = torch.stack([torch.sin(index * (k + 1.0)) for k in range(4)], dim=1).double()
        wanted = torch.stack([inputs.sum(1), inputs.prod(1)], dim=1)
        return self.times[index].mean() + (self.layer(inputs) - wanted).pow(2).mean()


class Counter(torch.optim.Optimizer):
    """Adds 1 to the weights that have a gradient, and keeps the sum of gradients."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Count."""
        for parameter in self.param_groups[0]["params"]:
            parameter += (parameter.grad > 0).double()
            state = self.state[parameter]
            state["sum"] = state["sum"] + parameter.grad if "sum" in state else parameter.grad.clone()


class Witness:
    """Something registered, whose state is taken where a replica gives its own to another one."""

    def __init__(self, given: Callable[[], None]) -> None:
        self.given = given

    def state_dict(self) -> dict[str, int]:
        """Say that the state is taken."""
        self.given()
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take nothing over."""


class Lines(GeneralTracker):
    """Writes which run in which process logged which step."""

    name, requires_logging_directory, tracker = "lines", False, None

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.run = path, os.getpid()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Write a line."""
        with self.path.open("a") as file:
            file.write("".join(f"{name} {self.run} {os.getpid()} {step}\n" for name in values))

    def state_dict(self) -> dict[str, int]:
        """Return the run."""
        return {"run": self.run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a run."""
        self.run = state.get("run", self.run)


def optimizers_of(model: Model) -> list[torch.optim.Optimizer]:
    """Return what trains the model, as here and in the plain loop."""
    return [Counter([model.times]), torch.optim.AdamW(model.layer.parameters(), lr=0.05)]


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule that moves once for each replica that trains in a step."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 10)


def main() -> None:
    """Train, and write what was counted."""
    folder, samples, epochs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    kills = sys.argv[4].split(",")
    plugin = axes = None
    if "tp" in sys.argv:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel

        from accel_core.plugins.parallelism import ParallelismConfig, TorchTensorParallelConfig

        plan = {"layer": ColwiseParallel(output_layouts=Replicate())}
        axes = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(tp_plan=plan))
    if "fsdp2" in sys.argv:
        from accel_parallel import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    hasty = "hasty" in sys.argv
    handlers: list[Any] = [
        FaultToleranceKwargs(
            timeout=4 if "brief" in sys.argv else 10 * float(sys.argv[-1]),
            quorum_timeout=3 if hasty else 60 * float(sys.argv[-1]),
            heal="once" not in sys.argv,
        )
    ]
    if "metered" in sys.argv:
        handlers.insert(0, MeterKwargs(every=1))
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16" if "fp16" in sys.argv else "no",
        fsdp_plugin=plugin,
        parallelism_config=axes,
        project_config=ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=hasty),
        kwargs_handlers=[*handlers, GradScalerKwargs(growth_interval=8)],
        log_with=[Lines(folder / "tracked")] if "tracking" in sys.argv else None,
    )
    replicas, own, rank = accelerator.replicas, 0, accelerator.process_index
    torch.manual_seed(replicas.number)  # the first replica's weights and order count
    model = Model(samples)
    counter, adam = optimizers_of(model)
    schedule = schedule_of(adam)
    loader = DataLoader(Numbers(samples), batch_size=BATCH, shuffle=True, num_workers=2 * ("workers" in sys.argv))
    model, counter, adam, schedule, loader = accelerator.prepare(model, counter, adam, schedule, loader)
    if hasty and (folder / "checkpoints").is_dir():
        accelerator.load_state()
    name = f"{replicas.number}-{rank}"

    def die(when: str) -> None:
        if f"{replicas.number}:{replicas.life}:{own}:{when}" in kills and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def give() -> None:
        if "giving" in kills and replicas.step:
            with suppress(FileExistsError):
                (folder / "gave").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)

    accelerator.register_for_checkpointing(Witness(give))
    accelerator.init_trackers("counting")

    def pause() -> None:
        if "pausing" in sys.argv and name == "0-0" and not (folder / "paused").exists():
            (folder / "paused").touch()
            # A signal for the process may reach another thread, and this one would go on until that one stops it.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    accelerator.register_save_state_pre_hook(lambda *_: die("saving"))
    if "aside" in sys.argv:
        write = Transaction.finish

        def write_late(*args: Any, **kwargs: Any) -> None:
            pause()
            write(*args, **kwargs)

        Transaction.finish = write_late  # type: ignore[method-assign]
    else:
        accelerator.register_save_state_pre_hook(lambda *_: pause())

    def starts(number: int) -> int:
        return len([*folder.glob(f"start-{number}-*")])

    if rank == 0:
        (folder / f"start-{replicas.number}-{replicas.life}").write_text(str(os.getpid()))
    while hasty and not all(map(starts, range(replicas.size))):
        time.sleep(LOOK)
    started: dict[int, int] = {}
    measured: list[tuple[Any, int]] = []
    for _ in range(epochs):
        for index in loader:
            loss = model(index)
            die("before")
            accelerator.backward(loss)
            die("within")
            counter.step()
            adam.step()
            if not adam.step_was_skipped and (
                loader.counts is None or loader.counts.real[loader.shard.process_index]  # not of repeats alone
            ):
                with (folder / f"read-{name}").open("a") as file:
                    file.write(f"{replicas.step} {len(replicas.living)} {' '.join(map(str, index.tolist()))}\n")
            if not adam.step_was_skipped:
                accelerator.log({"loss": loss.detach()}, step=replicas.step)
            if accelerator.meter and accelerator.meter.last not in (None, *(each for each, _ in measured[-1:])):
                measured.append((accelerator.meter.last, len(index)))
            die("behind")
            schedule.step()
            counter.zero_grad()
            adam.zero_grad()
            own += 1
            if "saving" in sys.argv and own % 4 == 0:
                accelerator.save_state(folder / "state", blocking="aside" not in sys.argv)
            missing = {*range(replicas.size)} - {*replicas.living} if replicas.living and "once" not in sys.argv else ()
            for number in range(replicas.size):  # one that died is waited for until it is about to come
                while any(kills) and number in missing and starts(number) == started.get(number, 1):
                    time.sleep(LOOK)
            started.update({number: starts(number) for number in replicas.living})
            time.sleep(PATIENCE if missing and any(kills) else LOOK * ("slow" in sys.argv))
        model.eval()
        with torch.no_grad():
            model(index)
        model.train()
        if (folder / "hold").exists() and replicas.number == 0:
            (folder / "held").touch()
            while (folder / "hold").exists():
                time.sleep(LOOK)
    weights = {key: whole(each.detach()) for key, each in accelerator.unwrap_model(model).named_parameters()}
    sums = next(iter(counter.state.values()))["sum"]
    found = {
        "weights": weights,
        "sums": whole(sums),
        "schedule": schedule.get_last_lr(),
        "epochs": schedule.state_dict()["last_epoch"],
        "random": torch.rand(1),
        "scale": accelerator.scaler and accelerator.scaler.get_scale(),
        "step": replicas.step,
        "samples": replicas.samples,
        "lost": replicas.lost_steps,
        "life": replicas.life,
        "measured": [(vars(each), size) for each, size in measured],
        "main": accelerator.is_main_process,
    }
    torch.save(found, folder / f"found-{name}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
