"""The transformers Trainer whose two ranks share sequences by DeepSpeed, and on one process without: what it logs."""

from typing import Any

import torch
from models import WORLD, llama, logged, report, sequences, settings, some_of
from transformers import Trainer, TrainingArguments, set_seed

from accelerate.utils import ParallelismConfig

IGNORED = -100


def _texts(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences whose first tokens, more than one rank holds, do not count."""
    found = []
    for text in sequences(count, seed=seed):
        labels = text["labels"].clone()
        labels[:6] = IGNORED
        found.append({**text, "labels": labels})
    return found


def _train(stage: int, count: int = 24, resumed_from: int | None = None) -> dict[str, Any]:
    config = {
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    shared = {"deepspeed": config, "parallelism_config": ParallelismConfig(sp_backend="deepspeed", sp_size=2)}
    set_seed(7)
    given = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 2,
        "max_grad_norm": 0.5,
        "eval_strategy": "epoch",
        "save_strategy": "no" if resumed_from is None else "epoch",
    }
    arguments = TrainingArguments(**settings(f"stage {stage}", **given, **(shared if WORLD > 1 else {})))
    texts = {"train_dataset": _texts(count, 1), "eval_dataset": _texts(8, 2)}
    trainer = Trainer(model=llama(), args=arguments, **texts)
    trainer.train()
    if resumed_from is not None:
        trainer = Trainer(model=llama(), args=arguments, **texts)
        trainer.train(resume_from_checkpoint=f"stage {stage}/checkpoint-{resumed_from}")
    found = logged(trainer, loss="loss", grad_norm="grad_norm", eval_loss="eval_loss")
    weights = some_of(trainer.accelerator.get_state_dict(trainer.model_wrapped))
    return {**found, "steps": trainer.state.global_step, "weights": weights}


if __name__ == "__main__":
    report({"stage 2": _train(2), "stage 3": _train(3, resumed_from=2), "uneven": _train(2, 18)})
