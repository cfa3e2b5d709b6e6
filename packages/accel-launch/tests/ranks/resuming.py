"""Trains three short epochs as docs/guides/launching.md shows, killing rank 1 once; then once more with nobody killed.

The words are a folder, and the batch after which rank 1 is killed in the first attempt.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, ProjectConfiguration, set_seed
from accel_core.errors import CheckpointNotFoundError

EPOCHS, EVERY = 3, 5


def main(folder: Path, kill_at: int) -> None:
    """Train, from the latest complete checkpoint where there is one.

    Args:
        folder: Where checkpoints and weights go.
        kill_at: Number of the batch after which rank 1 is killed; 0 trains straight, without a checkpoint.
    """
    folder.mkdir(exist_ok=True)
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    set_seed(0)
    inputs = torch.randn(64, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
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
            accelerator.backward(torch.nn.functional.mse_loss(model(batch), targets))
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if kill_at and done % EVERY == 0:
                accelerator.save_state()
            if done == kill_at and accelerator.process_index == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), folder / "end.pt")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    main(place / "killed", int(sys.argv[2]))
    main(place / "straight", 0)
    Accelerator().end_training()
