"""The transformers Trainer with `deepspeed=` on two gloo ranks, without on one: losses, norms, whole weights."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from models import WORLD, adapted, llama, logged, report, sequences, settings, some_of
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from accelerate.state import PartialState

OPEN = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}
SECOND = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, **OPEN}
THIRD = {
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    **OPEN,
}

TEMPLATE = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
"""What users of the Trainer copy for stage 3 with offloading."""


def _arguments(name: str, config: Any, kind: Any = TrainingArguments, **others: Any) -> Any:
    return kind(**settings(name, **others), **({"deepspeed": config} if WORLD > 1 else {}))


def _train(arguments: TrainingArguments, model: Any, resume: str | None = None) -> dict[str, Any]:
    set_seed(7)
    return _result(Trainer(model=model, args=arguments, train_dataset=sequences(20)), resume)


def _result(trainer: Trainer, resume: str | None = None) -> dict[str, Any]:
    trainer.train(resume_from_checkpoint=resume)
    return {
        **logged(trainer, losses="loss", norms="grad_norm", rates="learning_rate"),
        "weights": some_of(trainer.accelerator.get_state_dict(trainer.model_wrapped)),
        "engine": type(trainer.model_wrapped).__name__,
    }


def _arrived(file: str) -> dict[str, Any]:
    """Train a model that is sharded while transformers loads it, then go on from a checkpoint in the middle."""
    arguments = _arguments("arrived", file, save_strategy="steps", save_steps=2)
    found = _train(arguments, LlamaForCausalLM.from_pretrained("stored"))
    arguments = _arguments("arrived", file)
    resumed = _train(arguments, LlamaForCausalLM.from_pretrained("stored"), resume="arrived/checkpoint-2")
    return {**found, "resumed": resumed["weights"], "resumed losses": resumed["losses"]}


def _fine_tuned() -> dict[str, Any]:
    """Train an adapter by trl's trainer for instructions."""
    from datasets import Dataset
    from peft import LoraConfig
    from text import sentence, tokenizer
    from trl import SFTConfig, SFTTrainer

    set_seed(7)
    arguments = _arguments("sft", THIRD, SFTConfig, max_length=8, bf16=False, gradient_checkpointing=False)
    trainer = SFTTrainer(
        model=llama(),
        args=arguments,
        train_dataset=Dataset.from_list([{"text": sentence(seed)} for seed in range(16)]),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )
    return _result(trainer)


if __name__ == "__main__":
    state = PartialState(cpu=True)
    if state.is_main_process:
        Path("second.json").write_text(json.dumps(SECOND))
        Path("third.json").write_text(json.dumps(THIRD))
        Path("template.json").write_text(json.dumps(TEMPLATE))
        llama().save_pretrained("stored")
    state.wait_for_everyone()
    found = {
        "stage 2, dict": _train(_arguments("two", SECOND, gradient_accumulation_steps=3), llama()),
        "stage 2, file": _train(_arguments("file", "second.json", max_grad_norm=0.1), llama()),
        "stage 3, dict": _train(_arguments("dict", THIRD), llama()),
        "stage 3, template": _train(_arguments("three", "template.json"), llama()),
        "stage 3, loaded": _arrived("third.json"),
    }
    if find_spec("peft") is not None:
        found["stage 3, adapters"] = _train(_arguments("adapters", "third.json"), adapted())
    if find_spec("trl") is not None:
        found["stage 3, trl"] = _fine_tuned()
    report(found)
