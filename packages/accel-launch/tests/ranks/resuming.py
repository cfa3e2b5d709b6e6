"""Trains three short epochs as docs/tutorials/resume.md shows, killing rank 1 once; then once more with nobody killed.

The words are a folder, the batch after which rank 1 is killed in the first attempt, and "pipeline" where each rank is
to hold half of the layers.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, ParallelismConfig, ProjectConfiguration, set_seed
from accel_core.errors import CheckpointNotFoundError

EPOCHS, EVERY = 3, 5


class Block(torch.nn.Linear):
    """A layer that is there twice."""

    def __init__(self) -> None:
        super().__init__(8, 8)


def loss_of(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of a micro-batch."""
    return mse_loss(output, batch["targets"])


def main(folder: Path, kill_at: int, pipeline: bool) -> None:
    """Train, from the latest complete checkpoint where there is one.

    Args:
        folder: Where checkpoints and weights go.
        kill_at: Number of the batch after which rank 1 is killed; 0 trains straight, without a checkpoint.
        pipeline: Whether ranks are stages.
    """
    folder.mkdir(exist_ok=True)
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
    handlers, mesh = [], None
    if pipeline:
        from accel_parallel.pipeline.kwargs import PipelineKwargs

        handlers, mesh = [PipelineKwargs(loss_fn=loss_of, microbatches=2)], ParallelismConfig(pp_size=2)
    accelerator = Accelerator(project_config=project, kwargs_handlers=handlers, parallelism_config=mesh)
    set_seed(0)
    inputs = torch.randn(64, 8)
    model = torch.nn.Sequential(torch.nn.Sequential(Block(), Block()), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
    try:
        accelerator.load_state()
    except CheckpointNotFoundError:
        accelerator.print("from the beginning")
    done = loader.iteration * len(loader) + loader.cursor.offset // loader.total_batch_size
    if accelerator.is_main_process:
        with open(folder / "attempts", "a") as attempts:
            attempts.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} at {done}\n")
    for _ in range(loader.iteration, EPOCHS):
        for batch, targets in loader:
            loss = model(batch, targets=targets).loss if pipeline else mse_loss(model(batch), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if kill_at and done % EVERY == 0:
                accelerator.save_state()
            if done == kill_at and accelerator.process_index == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.save(weights, folder / "end.pt")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    staged = "pipeline" in sys.argv
    main(place / "killed", int(sys.argv[2]), staged)
    main(place / "straight", 0, staged)
    Accelerator().end_training()
