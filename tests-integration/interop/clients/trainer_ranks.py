"""The transformers Trainer on several gloo ranks or one process, trained with and without an evaluation before."""

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from models import digest, llama, report, sequences
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments, set_seed


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Sequences without a length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the sequences."""
        yield from sequences(24)


def _train(
    name: str, evaluate_first: bool = False, data: Any = None, evaluated: int = 16, **arguments: Any
) -> dict[str, Any]:
    """Train, and evaluate as many sequences: 16 fill the batches of all ranks, however they are shared."""
    set_seed(7)
    world = int(os.environ.get("WORLD_SIZE", "1"))
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
        train_dataset=sequences(24) if data is None else data,
        eval_dataset=sequences(evaluated, seed=2),
    )
    if evaluate_first:
        trainer.evaluate()
    trainer.train()
    digests: list[Any] = [digest(trainer.model)] * world
    if world > 1:
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
            "split": _train("split", accelerator_config={"split_batches": True}, per_device_train_batch_size=4),
            "dispatch": _train("dispatch", data=Stream(), max_steps=6, accelerator_config={"dispatch_batches": True}),
            "uneven evaluation": _train("uneven", evaluated=7, max_steps=2),
            "evaluated first": _train("evaluated", evaluate_first=True),
        }
    )


if __name__ == "__main__":
    main()
