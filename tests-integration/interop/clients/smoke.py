"""The smallest run of the transformers Trainer: accumulation, clipping, a schedule, a checkpoint, an evaluation."""

import hashlib
import json
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed


class Line(nn.Module):
    """A linear model with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the prediction."""
        predicted = self.layer(x).squeeze(-1)
        return {"loss": (predicted - labels).pow(2).mean(), "logits": predicted}


def main() -> None:
    """Train, and print what came out."""
    set_seed(7)
    data: list[dict[str, Any]] = [{"x": torch.rand(3), "labels": torch.rand(())} for _ in range(13)]
    arguments = TrainingArguments(
        output_dir="smoke", per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=2,
        learning_rate=0.1, max_grad_norm=0.5, logging_steps=1, save_steps=3, report_to=[], use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=Line(), args=arguments, train_dataset=data, eval_dataset=data[:5])
    trainer.train()
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in trainer.model.parameters()])
    found = {
        "accelerate": version("accelerate"),
        "log": [{key: row[key] for key in ("loss", "grad_norm", "learning_rate")} for row in trainer.state.log_history
                if "loss" in row],
        "evaluation": trainer.evaluate()["eval_loss"],
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
    }  # fmt: skip
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
