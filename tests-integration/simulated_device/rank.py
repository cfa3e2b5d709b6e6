"""One of two ranks on the simulated accelerator: trains, saves, goes astray, loads; `python rank.py FOLDER`."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import simulated
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accel_core.accelerator import Accelerator
from accel_core.checkpoint import preemption
from accel_core.data.prepare import prepare_data_loader
from accel_core.process import world


class IterableOf(IterableDataset):
    """Some samples."""

    def __init__(self, samples: list[torch.Tensor]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.samples)


def state_of(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return copies of weights, moments and the generators of host and device, on the CPU."""
    found = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
    for key, entries in optimizer.state_dict()["state"].items():
        found |= {f"{key}/{name}": value.cpu() for name, value in entries.items()}
    generators = getattr(torch, simulated.NAME)
    found |= {"host": torch.get_rng_state(), "device": generators.get_rng_state()}
    return {name: value.clone() for name, value in found.items()}


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    """Train on a batch of this rank's own, and draw from the generators of host and device."""
    batch = torch.rand(4, 8).to(accelerator.device)
    accelerator.backward(model(batch).square().sum())
    optimizer.step()
    optimizer.zero_grad()
    generators = getattr(torch, simulated.NAME)
    generators.manual_seed(int(torch.randint(1000, (1,))))


def copied(function: Callable[[], object]) -> list[int]:
    """Return how many bytes a function copies onto devices and off them, each time waiting for what is queued."""
    native = getattr(torch, simulated.NAME).native
    before = native.bytes_in(), native.bytes_out()
    function()
    return [native.bytes_in() - before[0], native.bytes_out() - before[1]]


def asked() -> list[list[int]]:
    """Return what a rank copies to ask whether any is to end, also where a group moves tensors of the host too."""
    preemption.requested()  # the first call makes a process group
    own = world.ensure()
    found = []
    for backend in (own.backend, f"{simulated.NAME}:{own.backend},cpu:gloo"):
        world._world = replace(own, backend=backend)
        found.append(copied(preemption.requested))
    world._world = own
    return found


def dispatched(rank: int) -> list[str]:
    """Return where batches lie that rank 0 reads for all, if nobody puts them on a device."""
    data = IterableOf([torch.ones(2)] * 4) if rank == 0 else IterableOf([])
    loader = prepare_data_loader(DataLoader(data, batch_size=1), put_on_device=False, dispatch_batches=True)
    return [str(batch.device) for batch in loader]


def main() -> dict[str, Any]:
    """Save in both ways; load with each place for optimizers; all is on this rank's device."""
    simulated.set_up()
    simulated.make_known()
    accelerator = Accelerator()
    torch.manual_seed(0)
    model, optimizer = nn.Linear(8, 300), None
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    torch.manual_seed(accelerator.process_index)
    step(accelerator, model, optimizer)
    saved = state_of(accelerator, model, optimizer)
    folder = Path(sys.argv[1])
    accelerator.save_state(str(folder / "now"))
    handle = accelerator.save_state(str(folder / "later"), blocking=False)
    step(accelerator, model, optimizer)
    handle.wait()
    accelerator.wait_for_everyone()
    accelerator.save_model(model, folder / "model")
    for name, place in (("now", None), ("later", None), ("now", "on_device"), ("later", "cpu")):
        step(accelerator, model, optimizer)
        accelerator.load_state(str(folder / name), map_location=place)
        loaded = state_of(accelerator, model, optimizer)
        assert [key for key in saved if not torch.equal(saved[key], loaded[key])] == [], (name, place)
    rank = int(os.environ["RANK"])
    own = torch.device(simulated.NAME, rank)
    assert (accelerator.process_index, accelerator.device) == (rank, own)
    assert getattr(torch, simulated.NAME).current_device() == rank
    assert torch.distributed.get_backend() == simulated.COLLECTIVES
    assert {value.device for value in model.parameters()} == {own}
    assert {state["exp_avg"].device for state in optimizer.state.values()} == {own}
    assert asked() == [[0, 0], [0, 0]]
    assert dispatched(rank) == ["cpu", "cpu"]
    return {}


if __name__ == "__main__":
    simulated.tell(main)
