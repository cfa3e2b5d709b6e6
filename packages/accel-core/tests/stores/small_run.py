"""A small run, its values, and saving it in a process that may be killed."""

import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_core.checkpoint.load import load_state
from accel_core.checkpoint.run import BareRun
from accel_core.checkpoint.save import save_state
from accel_core.plugins.project import ProjectConfiguration


def build(value: float, **project: Any) -> BareRun:
    """Return a run all of whose parameters and moments follow from one value."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.full((2, 3), value)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return BareRun([model], [optimizer], step=int(value), project=ProjectConfiguration(**project))


def set_to(run: BareRun, value: float) -> None:
    """Give a run the values of another."""
    run.models[0].load_state_dict(build(value).models[0].state_dict())
    run.optimizers[0].load_state_dict(build(value).optimizers[0].state_dict())
    run.step = int(value)


def values(run: BareRun) -> set[float]:
    """Return what a run's parts say which one it is: one value, unless it is a mixture."""
    model, optimizer = run.models[0], run.optimizers[0]
    found = {float(each) for parameter in model.parameters() for each in parameter.detach().flatten()}
    moments = optimizer.state_dict()["state"][0]["exp_avg"].flatten()
    # The gradient of the sum over two rows is twice the input, of which a tenth goes into the first moment.
    return found | {round(float(each) * 5, 4) for each in moments} | {float(run.step)}


def stored(address: str | Path | None, **project: Any) -> set[float]:
    """Return the values of the checkpoint at an address."""
    run = build(99.0, **project)
    load_state(run, address)
    return values(run)


def save_when_told(address: str, temporary: str, variables: dict[str, str], pipe: Connection) -> None:
    """Save again and again, each time in a process of its own: its id goes to the parent, which arms the server.

    For each value that comes: the id of the process, its status when it has ended.
    """
    os.environ.update(variables)
    import tempfile

    from store_server import file_system

    file_system()  # before the fork, and not once in each process
    from accel_core.checkpoint.remote import store

    tempfile.tempdir, store._PAUSE = temporary, 0.0
    while (value := pipe.recv()) is not None:
        process = os.fork()
        if process == 0:
            run = build(value)
            pipe.send(os.getpid())
            pipe.recv()
            save_state(run, address)
            os._exit(0)
        pipe.send(os.waitpid(process, 0)[1])
