"""The transformers Trainer on several gloo ranks, trained with and without an evaluation before."""

import os
from typing import Any

import torch
import torch.distributed as dist
from models import digest, llama, report, sequences
from transformers import Trainer, TrainingArguments, set_seed


def _train(name: str, evaluate_first: bool = False, **arguments: Any) -> dict[str, Any]:
    set_seed(7)
    world = int(os.environ["WORLD_SIZE"])
    settings = {
        "output_dir": name,
        "per_device_train_batch_size": 4 // world,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        **arguments,
    }
    trainer = Trainer(
        model=llama(),
        args=TrainingArguments(**settings),
        train_dataset=sequences(24),
        eval_dataset=sequences(7, seed=2),
    )
    if evaluate_first:
        trainer.evaluate()
    trainer.train()
    digests: list[Any] = [None] * world
    dist.all_gather_object(digests, digest(trainer.model))
    flat = torch.cat([tensor.reshape(-1) for _, tensor in sorted(trainer.model.state_dict().items())])
    return {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "evaluation": trainer.evaluate()["eval_loss"],
        "ranks agree": len(set(digests)) == 1,
        "weights": flat[:: max(1, flat.numel() // 50)].tolist(),
    }


def main() -> None:
    """Run every case and print what came out."""
    report(
        {
            "plain": _train("plain"),
            "accumulation": _train("accumulation", gradient_accumulation_steps=3),
            "evaluated first": _train("evaluated", evaluate_first=True),
        }
    )


if __name__ == "__main__":
    main()
