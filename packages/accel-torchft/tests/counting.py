"""A training whose weights count: each sample has one, which says in how many steps it was trained with.

    counting.py FOLDER SAMPLES EPOCHS KILLS

KILLS are `replica:life:step:when`, with commas: a replica kills itself in a life before or behind a step of its own.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from accel_core.accelerator import Accelerator
from accel_core.plugins.handlers import KwargsHandler
from accel_torchft.kwargs import FaultToleranceKwargs

FOLDER, SAMPLES, EPOCHS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
KILLS = [tuple(kill.split(":")) for kill in sys.argv[4].split(",") if kill]


class Numbers(Dataset[torch.Tensor]):
    """Numbers from 0."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Counts(torch.nn.Module):
    """A weight for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.times = torch.nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.times[index].mean()


class Counter(torch.optim.Optimizer):
    """Adds 1 to the weights that have a gradient, and keeps the sum of all gradients, which is that of the shares."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter += parameter.grad > 0
                state = self.state[parameter]
                state["share"] = state.get("share", torch.zeros(())) + parameter.grad.sum()


def main() -> None:
    """Train, and write what was counted."""
    handlers: list[KwargsHandler] = [FaultToleranceKwargs(timeout=10)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    torch.manual_seed(accelerator.process_index)
    model = Counts()
    optimizer = Counter(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 10)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Numbers(), batch_size=4, shuffle=True))
    schedule = accelerator.prepare(schedule)
    replicas, own = accelerator.replicas, 0

    def die(when: str) -> None:
        if replicas and (str(replicas.number), str(replicas.life), str(own), when) in KILLS:
            os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(EPOCHS):
        for index in loader:
            loss = model(index)
            die("before")
            accelerator.backward(loss)
            die("within")
            optimizer.step()
            die("behind")
            schedule.step()
            optimizer.zero_grad()
            own += 1
            if replicas and len(replicas.living) < replicas.size:
                time.sleep(0.3)  # until the one that died is back
    found = {
        "counts": accelerator.unwrap_model(model).times.detach().clone(),
        "share": next(iter(optimizer.state.values()))["share"],
        "schedule": schedule.state_dict()["last_epoch"],
        "steps": replicas.step,
        "lost": replicas.lost_steps,
        "samples": replicas.samples,
        "life": replicas.life,
        "main": accelerator.is_main_process,
        "random": torch.rand(1),
    }
    torch.save(found, FOLDER / f"replica-{replicas.number}-{accelerator.process_index}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
