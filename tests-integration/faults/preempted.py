"""Trains sixty steps with the two lines of docs/concepts/checkpoints.md: preempted.py FOLDER SECONDS_PER_STEP."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_core.accelerator import Accelerator
from accel_core.checkpoint import preemption

STEPS = 60


class Progress:
    """Which step comes next."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        """Return the step."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take a step."""
        self.step = state["step"]


def main(folder: Path, pause: float) -> None:
    """Train, and save and leave when asked to."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    data = TensorDataset(torch.rand(96, 2))
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    preemption.watch()
    if (folder / "ckpt").exists():
        accelerator.load_state(str(folder / "ckpt"))
    while progress.step < STEPS:
        for (batch,) in loader:
            accelerator.backward(model(batch + torch.rand_like(batch)).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            time.sleep(pause)
            (folder / f"at-{accelerator.process_index}").write_text(str(progress.step))
            if preemption.requested():
                accelerator.save_state(str(folder / "ckpt"))
                preemption.leave()
    end = {"weight": accelerator.unwrap_model(model).weight, "next": torch.rand(1)}
    torch.save(end, folder / f"end-{accelerator.process_index}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
