"""Print, as JSON, what each rank reads after a checkpoint was loaded.

    python resuming.py RANKS

The program uses the `accelerate` of the interpreter that runs it. It starts its own ranks on gloo: those that are
interrupted, and those that go on.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LENGTH, SIZE = 23, 2
KINDS: dict[str, dict[str, Any]] = {
    "in order": {},
    "shuffled": {"shuffle": True},
    "seedable": {"shuffle": True, "use_seedable_sampler": True},
    "data seed": {"shuffle": True, "use_seedable_sampler": True, "data_seed": 3},
    "dispatched": {"dispatch_batches": True},
    "stream": {"stream": True},
    "shared stream": {"stream": True, "dispatch_batches": False},
}
DISPATCHED = ("dispatched", "stream")
SKIPS = ("restart", "skip_first_batches", "set_epoch")


def cases(ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name every case: kind of loader, epoch and batch that the run ends after, and how the next one goes on."""
    last = -(-LENGTH // (SIZE * ranks))
    for kind, epoch, batch, skip in itertools.product(KINDS, (0, 1), (3, last), SKIPS):
        if skip == "skip_first_batches" and kind in DISPATCHED:
            continue  # the original skips the batches of one rank instead of all, and raises where nothing is left
        yield f"{kind}, epoch {epoch} batch {batch}, {skip}", {"kind": kind, "stop": (epoch, batch), "skip": skip}


def made(case: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return an Accelerator, a model and a loader, prepared as a script does at its beginning."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import set_seed

    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[int]:
            return iter(range(LENGTH))

    options = dict(KINDS[case["kind"]])
    data: Any = Stream() if options.pop("stream", False) else range(LENGTH)
    AcceleratorState._reset_state()
    GradientState._reset_state()
    set_seed(7)
    loader = DataLoader(data, batch_size=SIZE, shuffle=options.pop("shuffle", None))
    config = DataLoaderConfiguration(**options)
    accelerator = Accelerator(cpu=True, dataloader_config=config, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return accelerator, model, loader


def interrupted(case: dict[str, Any], folder: str) -> None:
    """Read up to the end of the case's run, and save."""
    accelerator, model, loader = made(case)
    for epoch in range(2):
        for number, _ in enumerate(loader, 1):
            with accelerator.accumulate(model):
                pass
            if (epoch, number) == case["stop"]:
                accelerator.save_state(folder)
                return


def resumed(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Load, and return the batches of two passes, where gradients were synchronized, and what the loader counts."""
    import torch

    accelerator, model, loader = made(case)
    accelerator.load_state(folder)
    epoch, batch = case["stop"]
    if case["skip"] == "set_epoch":
        loader.set_epoch(epoch)
    skipping = case["skip"] == "skip_first_batches"
    first = accelerator.skip_first_batches(loader, batch) if skipping else loader
    passes = []
    # After an epoch that was read with skips, the original draws that epoch's seeded order once more.
    for one in [first] if skipping and "use_seedable_sampler" in KINDS[case["kind"]] else [first, loader]:
        read = []
        for values in one:
            with accelerator.accumulate(model):
                read.append((values.tolist(), accelerator.sync_gradients, one.end_of_dataloader))
        passes.append(read)
    # Ranks that are sent their batches draw other numbers in the original, whether a run was interrupted or not.
    drawn = [] if case["kind"] in DISPATCHED else torch.rand(2).tolist()
    return {"passes": passes, "step": accelerator.step, "drawn": drawn}


def work(rank: int, ranks: int, folder: str, action: str) -> None:
    """Do all cases on one rank, and write what was found."""
    os.environ.update(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    if ranks > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in place.items()})
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{folder}/{action}", rank=rank, world_size=ranks)
    found: dict[str, Any] = {}
    for number, (name, case) in enumerate(cases(ranks)):
        place = os.path.join(folder, f"state-{number}")
        found[name] = interrupted(case, place) if action == "interrupted" else resumed(case, place)
    Path(folder, f"{action}-{rank}.json").write_text(json.dumps(found))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    """Start the ranks, twice, and print what the second ones read, by rank."""
    import torch.multiprocessing

    ranks = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        for action in ("interrupted", "resumed"):
            torch.multiprocessing.start_processes(work, (ranks, folder, action), nprocs=ranks, start_method="fork")
        found = [json.loads(Path(folder, f"resumed-{rank}.json").read_text()) for rank in range(ranks)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
