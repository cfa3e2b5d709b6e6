"""The transformers Trainer whose two ranks share sequences by DeepSpeed, and on one process without: what it logs."""

from typing import Any

import torch
from models import WORLD, llama, report, sequences
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
    arguments = TrainingArguments(
        output_dir=f"stage {stage}",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=4,
        num_train_epochs=2,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="no" if resumed_from is None else "epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **(shared if WORLD > 1 else {}),
    )
    texts = {"train_dataset": _texts(count, 1), "eval_dataset": _texts(8, 2)}
    trainer = Trainer(model=llama(), args=arguments, **texts)
    trainer.train()
    if resumed_from is not None:
        trainer = Trainer(model=llama(), args=arguments, **texts)
        trainer.train(resume_from_checkpoint=f"stage {stage}/checkpoint-{resumed_from}")
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    flat = torch.cat([tensor.float().reshape(-1) for _, tensor in sorted(state.items())]) if state else torch.zeros(1)
    logged = {key: [row[key] for row in trainer.state.log_history if key in row] for key in ("loss", "grad_norm")}
    evaluated = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    steps = trainer.state.global_step
    return {**logged, "eval_loss": evaluated, "steps": steps, "weights": flat[:: max(1, len(flat) // 200)].tolist()}


def main() -> None:
    """Run every case and print what came out."""
    report({"stage 2": _train(2), "stage 3": _train(3, resumed_from=2), "uneven": _train(2, 18)})


if __name__ == "__main__":
    main()
