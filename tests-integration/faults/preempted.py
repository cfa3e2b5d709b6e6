"""Trains a hundred slow steps on SETTINGS["size"] ranks, with the two lines of docs/concepts/checkpoints.md."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from accel_core.accelerator import Accelerator
from accel_core.checkpoint import preemption

SETTINGS: dict[str, Any] = globals().get("SETTINGS", {})


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


def main() -> None:
    """Train, and save and leave when asked to."""
    rank, directory = SETTINGS["rank"], Path(SETTINGS["directory"])
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(SETTINGS["size"]),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(SETTINGS["size"]),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_DEBUG_RDV_FILE": SETTINGS["meeting"],
    }
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    preemption.watch()
    if (directory / "ckpt").exists():
        accelerator.load_state(str(directory / "ckpt"))
    while progress.step < 100:
        accelerator.backward(model(torch.rand(4, 2)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        time.sleep(SETTINGS["pause"])
        (directory / f"at-{rank}").write_text(str(progress.step))
        if preemption.requested():
            accelerator.save_state(str(directory / "ckpt"))
            preemption.leave()
    torch.save({"weight": accelerator.unwrap_model(model).weight, "next": torch.rand(1)}, directory / f"end-{rank}.pt")
    accelerator.end_training()


if __name__ == "preempted":
    main()
