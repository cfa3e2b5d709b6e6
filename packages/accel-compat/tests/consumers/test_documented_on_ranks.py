"""What the documentation shows of several processes, where the engine's own tests do not show it."""

import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from accel_testing import world
from accelerate import Accelerator, PartialState
from accelerate.utils import ProfileKwargs, save

RANKS = 2


@world(RANKS)
def test_each_process_knows_its_place(tmp_path: Path) -> None:
    """Numbers and flags are those of this rank, and the first one alone enters a block of the main process."""
    accelerator = Accelerator(cpu=True)
    rank = int(os.environ["RANK"])
    assert accelerator.process_index == accelerator.local_process_index == rank
    assert accelerator.is_main_process == accelerator.is_local_main_process == (rank == 0)
    assert accelerator.is_last_process == (rank == RANKS - 1)
    with accelerator.local_main_process_first():
        if accelerator.is_main_process:
            time.sleep(0.05)
            (tmp_path / "first").touch()
        assert (tmp_path / "first").exists()


@world(RANKS)
def test_decorated_functions_run_on_one_process() -> None:
    """Each decorator, of the Accelerator and of the state, lets one rank run and gives the others None."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index

    def act() -> str:
        return "ran"

    for owner in (accelerator, PartialState()):
        for name, chosen in (("on_main_process", 0), ("on_local_main_process", 0), ("on_last_process", RANKS - 1)):
            assert getattr(owner, name)(act)() == ("ran" if rank == chosen else None)
        assert owner.on_process(process_index=1)(act)() == ("ran" if rank == 1 else None)
        assert owner.on_local_process(local_process_index=1)(act)() == ("ran" if rank == 1 else None)


@world(RANKS)
def test_the_main_process_prints_and_writes_once(tmp_path: Path) -> None:
    """Text and objects come from the first process alone, traces of a profile from each."""
    accelerator = Accelerator(cpu=True)
    printed = tmp_path / f"printed-{accelerator.process_index}"
    with printed.open("w") as file:
        accelerator.print("Hello world!", file=file)
    assert printed.read_text() == ("Hello world!\n" if accelerator.is_local_main_process else "")
    accelerator.save([accelerator.process_index], str(tmp_path / "method.pkl"))
    save([accelerator.process_index], str(tmp_path / "function.pkl"))
    with accelerator.profile(ProfileKwargs(output_trace_dir=str(tmp_path / "traces"))):
        torch.ones(2, 2) @ torch.ones(2, 2)
    accelerator.wait_for_everyone()
    assert torch.load(tmp_path / "method.pkl") == torch.load(tmp_path / "function.pkl") == [0]
    assert len(list((tmp_path / "traces").iterdir())) == RANKS


@world(RANKS)
def test_settings_of_loaders_count_when_they_are_prepared() -> None:
    """Batches are even, split or read by one rank as the Accelerator says at that moment."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index

    def own(length: int, size: int) -> list[list[int]]:
        loader = accelerator.prepare_data_loader(DataLoader(range(length), batch_size=size))  # type: ignore[arg-type]
        return [batch.tolist() for batch in loader]

    assert own(5, 2) == ([[0, 1], [4, 0]], [[2, 3], [1, 2]])[rank]
    accelerator.even_batches = False
    assert own(5, 2) == ([[0, 1], [4]], [[2, 3]])[rank]
    accelerator.dataloader_config.split_batches = True
    assert own(8, 4) == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])[rank]
    accelerator.dataloader_config.split_batches = False
    accelerator.dataloader_config.dispatch_batches = True
    assert own(8, 2) == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])[rank]
