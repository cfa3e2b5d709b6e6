"""The transformers Trainer and trl's save and resume: `fsdp_resume.py straight`, then `resumed` in the same folder.

On two gloo ranks models are sharded, on one process they are whole. `straight` trains to the end and leaves its
checkpoints; `resumed` goes on from the middle one, in a process of its own.
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from datasets import Dataset
from models import WORLD, adapted, hash_of, llama, lora, report, sequences, settings, some_of
from text import sentence, tokenizer
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from trl import SFTConfig, SFTTrainer

from accelerate.utils import gather_object, reduce

STEPS, MIDDLE = 4, 2
BLOCKS = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}


def _local(value: torch.Tensor) -> torch.Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def _held(trainer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what this rank holds of weights and of the optimizer."""
    for name, parameter in trainer.model.named_parameters():
        yield name, _local(parameter)
        for key, value in sorted(trainer.optimizer.state.get(parameter, {}).items()):
            yield f"{name} {key}", _local(value)


def _digest(trainer: Any, weights_only: bool = False) -> str:
    return hash_of((name, value) for name, value in _held(trainer) if not weights_only or " " not in name)


def _moments(trainer: Any) -> list[float]:
    """Return the sums of squares of the optimizer's moments over all ranks."""
    squares = torch.zeros(2, dtype=torch.float64)
    for name, value in _held(trainer):
        for place, key in enumerate((" exp_avg", " exp_avg_sq")):
            if name.endswith(key):
                squares[place] += value.double().square().sum()
    total = reduce(squares, "sum")
    return [float(value) for value in total]


class Watch(TrainerCallback):  # type: ignore[misc]
    """Notes what every rank holds in the middle and at the end, before the best model is loaded."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.found: dict[str, Any] = {}

    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: dict[str, float], **given: Any) -> None:
        """Let the first evaluated model be the best."""
        metrics["eval_earliness"] = -state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Note digests, and at the end the moments."""
        if state.global_step == MIDDLE:
            self.found["middle"] = _digest(self.trainer, weights_only=True)
        if state.global_step == STEPS:
            self.found |= {"end": _digest(self.trainer), "moments": _moments(self.trainer)}
            self.found["weights"] = some_of(self.trainer.accelerator.get_state_dict(self.trainer.model))


def _settings(name: str, fsdp: dict[str, Any], **given: Any) -> dict[str, Any]:
    """Return arguments of a run whose first evaluated model counts as the best."""
    sharding = {"fsdp": True, "fsdp_config": {**BLOCKS, **fsdp}} if WORLD > 1 else {}
    best = {
        "per_device_eval_batch_size": 4 // WORLD,
        "max_steps": STEPS,
        "bf16": False,
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "save_steps": MIDDLE,
        "eval_steps": MIDDLE,
        "load_best_model_at_end": True,
        "metric_for_best_model": "earliness",
        "greater_is_better": True,
        "label_names": ["labels"],
    }
    return settings(name, **{**best, **sharding, **given})


def _trainer(name: str, fsdp: dict[str, Any], adapters: bool, watch: Watch) -> Any:
    net: Any = adapted() if adapters else llama()
    arguments = TrainingArguments(**_settings(name, fsdp))
    return Trainer(
        model=net, args=arguments, train_dataset=sequences(24), eval_dataset=sequences(8, seed=2), callbacks=[watch]
    )


def _sft(name: str, fsdp: dict[str, Any], adapters: bool, watch: Watch) -> Any:
    arguments = SFTConfig(
        **_settings(name, fsdp, gradient_checkpointing=False, max_length=8, shuffle_dataset=False, eos_token="</s>")
    )
    rows = Dataset.from_list([{"text": sentence(seed)} for seed in range(24)])
    torch.manual_seed(3)
    return SFTTrainer(
        model=llama(),
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows.select(range(8)),
        processing_class=tokenizer(),
        peft_config=lora() if adapters else None,
        callbacks=[watch],
    )


def _run(name: str, make: Any, fsdp: dict[str, Any], resume: bool, adapters: bool = False) -> dict[str, Any]:
    """Train to the end, from the beginning or from the checkpoint in the middle."""
    set_seed(7)
    watch = Watch()
    watch.trainer = trainer = make(name, fsdp, adapters, watch)
    trainer.train(resume_from_checkpoint=f"{name}/checkpoint-{MIDDLE}" if resume else None)
    rows = [row for row in trainer.state.log_history if row["step"] > MIDDLE]
    digests = [{"best": _digest(trainer, weights_only=True), **watch.found}]
    return {
        "losses": [row["loss"] for row in rows if "loss" in row],
        "evaluated": [row["eval_loss"] for row in rows if "eval_loss" in row],
        "norms": [row["grad_norm"] for row in rows if "grad_norm" in row],
        "moments": watch.found["moments"],
        "weights": watch.found["weights"],
        "ranks": [{key: each.get(key) for key in ("middle", "best", "end")} for each in gather_object(digests)],
        "files": sorted(os.listdir(f"{name}/checkpoint-{MIDDLE}")),
    }


def _only_model(version: int) -> bool:
    """Return whether `from_pretrained` reads the weights that a run ends with, where only the model is saved."""
    name = f"only {version}"
    set_seed(7)
    best = {"load_best_model_at_end": False, "metric_for_best_model": None}
    given = {"save_only_model": True, "max_steps": MIDDLE, **best}
    arguments = TrainingArguments(**_settings(name, {"version": version}, **given))
    trainer = Trainer(model=llama(), args=arguments, train_dataset=sequences(24), eval_dataset=sequences(8, seed=2))
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.accelerator.is_main_process:
        stored = LlamaForCausalLM.from_pretrained(f"{name}/checkpoint-{MIDDLE}").state_dict()
        return all(torch.equal(stored[key], value) for key, value in state.items())
    return True


CASES: dict[str, tuple[Any, dict[str, Any], bool]] = {
    f"{title}, version {version}, {kind.split('_')[0].lower()}": (
        make,
        {"version": version, "state_dict_type": kind},
        adapters,
    )
    for title, make, adapters in (
        ("trainer", _trainer, False),
        ("adapters", _trainer, True),
        ("sft", _sft, False),
        ("sft of adapters", _sft, True),
    )
    for version in (2, 1)
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
}


def main() -> None:
    """Run every case and print what came out; one process has the same whole model in all forms of a case."""
    resume = sys.argv[1] == "resumed"
    wanted = [name for name in CASES if WORLD > 1 or name.endswith("version 2, full")]
    found: dict[str, Any] = {}
    for name in wanted:
        make, fsdp, adapters = CASES[name]
        found[name] = _run(name, make, fsdp, resume, adapters)
    if not resume:
        found["only the model"] = [_only_model(version) for version in (2, 1)]
    report(found)


if __name__ == "__main__":
    main()
