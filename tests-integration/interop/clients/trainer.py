"""The transformers Trainer in one process: many ways to train, evaluate, predict, save and resume."""

from typing import Any

import torch
from models import Stream, digest, llama, logged, report, sequences, settings
from transformers import Trainer, TrainingArguments, set_seed

DATA = sequences(24)
EVALUATION = sequences(7, seed=2)


def _trainer(name: str, data: Any = DATA, **arguments: Any) -> Trainer:
    set_seed(7)
    batches = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), 2)
    given = TrainingArguments(**settings(name, **batches, **arguments))
    return Trainer(model=llama(), args=given, train_dataset=data, eval_dataset=EVALUATION)


def _train(name: str, **arguments: Any) -> dict[str, Any]:
    trainer = _trainer(name, **arguments)
    trainer.train()
    found = logged(trainer, losses="loss", norms="grad_norm")
    return {**found, "weights": digest(trainer.model), "steps": trainer.state.global_step}


def _evaluate() -> dict[str, Any]:
    trainer = _trainer("evaluate")
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    predicted = trainer.predict(EVALUATION)
    logits = torch.as_tensor(predicted.predictions)
    return {
        "before": before,
        "after": trainer.evaluate()["eval_loss"],
        "logits": logits.double().abs().sum().item(),
        "shape": list(logits.shape),
        "weights": digest(trainer.model),
    }


def _resume() -> dict[str, Any]:
    whole = _train("whole", max_steps=6, num_train_epochs=3)
    stopped = _trainer("resume", max_steps=6, num_train_epochs=3, save_strategy="steps", save_steps=3)
    stopped.train()
    again = _trainer("resume", max_steps=6, num_train_epochs=3, save_strategy="no")
    again.train(resume_from_checkpoint="resume/checkpoint-3")
    return {"weights": digest(again.model), "equal": digest(again.model) == whole["weights"]}


def _find_batch_size() -> dict[str, Any]:
    sizes: list[int] = []

    class Small(Trainer):
        def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
            sizes.append(len(inputs["input_ids"]))
            if len(inputs["input_ids"]) > 4:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, *args, **kwargs)

    set_seed(7)
    arguments = TrainingArguments(
        output_dir="find", per_device_train_batch_size=12, auto_find_batch_size=True, max_steps=2, report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Small(model=llama(), args=arguments, train_dataset=DATA)
    trainer.train()
    return {"sizes": sizes, "weights": digest(trainer.model)}


if __name__ == "__main__":
    report(
        {
            "plain": _train("plain"),
            "accumulation": _train("accumulation", gradient_accumulation_steps=4, num_train_epochs=2),
            "short window": _train("short", gradient_accumulation_steps=5),
            "bf16": _train("bf16", bf16=True),
            "clipping": _train("clipping", max_grad_norm=0.1),
            "split": _train("split", accelerator_config={"split_batches": True}),
            "dispatch": _train("dispatch", data=Stream(24), max_steps=5, accelerator_config={"dispatch_batches": True}),
            "stream": _train("stream", data=Stream(24), max_steps=5, accelerator_config={"dispatch_batches": False}),
            "unseeded": _train("unseeded", accelerator_config={"use_seedable_sampler": False}),
            "checkpointing": _train("checkpointing", gradient_checkpointing=True),
            "evaluate": _evaluate(),
            "resume": _resume(),
            "find batch size": _find_batch_size(),
        }
    )
