"""trl's SFT with adapters of peft, for the client of sharded training: on two gloo ranks, plain on one process."""

from typing import Any

from datasets import Dataset
from models import WORLD, llama, logged, settings, some_of
from peft import LoraConfig
from text import sentence, tokenizer
from torch.distributed.tensor import DTensor
from transformers import set_seed
from trl import SFTConfig, SFTTrainer


def sft(name: str, adapters: bool) -> dict[str, Any]:
    """Train the whole model, or adapters; return losses, weights and how many elements were trained."""
    set_seed(7)
    shards: dict[str, Any] = {"fsdp": True, "fsdp_config": {}} if WORLD > 1 else {}
    plain = {"bf16": False, "gradient_checkpointing": False, "max_length": 8, "shuffle_dataset": False}
    arguments = SFTConfig(**settings(name, max_steps=3, **plain, **shards))
    trainer = SFTTrainer(
        model=llama(),
        args=arguments,
        train_dataset=Dataset.from_list([{"text": sentence(seed)} for seed in range(12)]),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if adapters else None,
    )
    trainer.train()
    assert trainer.optimizer is not None
    return {
        **logged(trainer, losses="loss"),
        "weights": some_of(trainer.accelerator.get_state_dict(trainer.model)),
        "trained": sum(p.numel() for group in trainer.optimizer.param_groups for p in group["params"]),
        "sharded": any(isinstance(p, DTensor) for p in trainer.model.parameters()),
    }
