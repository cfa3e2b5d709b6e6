"""Print, as JSON, what each rank gets from loaders that a library prepared.

    python batches.py LIBRARY RANKS

LIBRARY is `accelerate` or `accel_core`. The program starts its own ranks on gloo.
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

LENGTHS, SIZES = (1, 2, 3, 5, 7, 8, 9, 12, 16, 17), (1, 2, 3, 4)


def cases(ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name every case, and say how its loader is made and prepared."""
    switches = itertools.product((False, True), (False, True), (False, True), (False, True))
    for drop_last, split, dispatch, stream in switches:
        for length, size in itertools.product(LENGTHS, SIZES):
            if split and size % ranks:
                continue
            whole = size if split else size * ranks
            if dispatch and drop_last and length < whole:
                continue  # the original raises where not even one global batch is full
            case = {
                "length": length,
                "size": size,
                "drop_last": drop_last,
                "split": split,
                "dispatch": dispatch,
                "stream": stream,
            }
            yield " ".join(f"{key}={value}" for key, value in case.items()), case


def read(prepare: Any, case: dict[str, Any]) -> list[Any]:
    """Return the batches of one loader, with whether each was said to be the last."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[int]:
            return iter(range(case["length"]))

    data: Any = Stream() if case["stream"] else range(case["length"])
    loader = prepare(
        DataLoader(data, batch_size=case["size"], drop_last=case["drop_last"]),
        device=torch.device("cpu"),
        split_batches=case["split"],
        put_on_device=True,
        dispatch_batches=case["dispatch"],
    )
    return [(batch.tolist(), loader.end_of_dataloader) for batch in loader]


def shuffled(prepare: Any, seedable: bool) -> list[Any]:
    """Return two epochs of a shuffled loader."""
    import torch
    from torch.utils.data import DataLoader

    torch.manual_seed(5)
    loader = prepare(
        DataLoader(range(13), batch_size=2, shuffle=True), rng_types=["generator"], use_seedable_sampler=seedable
    )
    return [[batch.tolist() for batch in loader] for _ in range(2)]


def work(rank: int, library: str, ranks: int, folder: str) -> None:
    """Read all cases on one rank, and write what was found."""
    os.environ.update(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    if ranks > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in place.items()})
    import torch.distributed as dist

    if ranks > 1:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    if library == "accelerate":
        from accelerate import Accelerator
        from accelerate.data_loader import prepare_data_loader

        Accelerator(cpu=True)
    else:
        from accel_core.data.prepare import prepare_data_loader
    found: dict[str, Any] = {name: read(prepare_data_loader, case) for name, case in cases(ranks)}
    found |= {f"shuffled seedable={flag}": shuffled(prepare_data_loader, flag) for flag in (False, True)}
    with open(os.path.join(folder, f"{rank}.json"), "w") as file:
        json.dump(found, file)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    """Start the ranks and print what they found, by rank."""
    import torch.multiprocessing

    library, ranks = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(work, (library, ranks, folder), nprocs=ranks, start_method="fork")
        found = [Path(folder, f"{rank}.json").read_text() for rank in range(ranks)]
    print(json.dumps([json.loads(text) for text in found]))


if __name__ == "__main__":
    main()
