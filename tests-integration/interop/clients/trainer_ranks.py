"""The transformers Trainer on several gloo ranks or one process, trained with and without an evaluation before."""

from typing import Any

from models import Stream, llama, logged, report, sequences, settings, trained
from transformers import Trainer, TrainingArguments, set_seed


def _train(
    name: str, evaluate_first: bool = False, data: Any = None, evaluated: int = 16, **arguments: Any
) -> dict[str, Any]:
    """Train, and evaluate as many sequences: 16 fill the batches of all ranks, however they are shared."""
    set_seed(7)
    trainer = Trainer(
        model=llama(),
        args=TrainingArguments(**settings(name, **arguments)),
        train_dataset=sequences(24) if data is None else data,
        eval_dataset=sequences(evaluated, seed=2),
    )
    if evaluate_first:
        trainer.evaluate()
    trainer.train()
    return {
        **logged(trainer, losses="loss"),
        "evaluation": trainer.evaluate()["eval_loss"],
        **trained(trainer.model),
    }


if __name__ == "__main__":
    report(
        {
            "plain": _train("plain"),
            "accumulation": _train("accumulation", gradient_accumulation_steps=3),
            "split": _train("split", accelerator_config={"split_batches": True}, per_device_train_batch_size=4),
            "dispatch": _train("dispatch", data=Stream(24), max_steps=6, accelerator_config={"dispatch_batches": True}),
            "uneven evaluation": _train("uneven", evaluated=7, max_steps=2),
            "evaluated first": _train("evaluated", evaluate_first=True),
        }
    )
