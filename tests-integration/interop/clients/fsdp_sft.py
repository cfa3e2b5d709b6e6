"""trl's SFT with adapters of peft, for the client of sharded training: on two gloo ranks, plain on one process."""

import os
from typing import Any

import torch
from datasets import Dataset
from models import QUIET, llama
from peft import LoraConfig
from text import sentence, tokenizer
from torch.distributed.tensor import DTensor
from transformers import set_seed
from trl import SFTConfig, SFTTrainer

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def sft(name: str, adapters: bool) -> dict[str, Any]:
    """Train the whole model, or adapters; return losses, weights and how many elements were trained."""
    set_seed(7)
    settings: dict[str, Any] = {"fsdp": True, "fsdp_config": {}} if WORLD > 1 else {}
    arguments = SFTConfig(
        output_dir=name,
        per_device_train_batch_size=4 // WORLD,
        max_steps=3,
        **QUIET,
        bf16=False,
        gradient_checkpointing=False,
        max_length=8,
        shuffle_dataset=False,
        **settings,
    )
    trainer = SFTTrainer(
        model=llama(),
        args=arguments,
        train_dataset=Dataset.from_list([{"text": sentence(seed)} for seed in range(12)]),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if adapters else None,
    )
    trainer.train()
    assert trainer.optimizer is not None
    state = trainer.accelerator.get_state_dict(trainer.model)
    flat = torch.cat([tensor.float().reshape(-1) for _, tensor in sorted(state.items())]) if state else torch.zeros(1)
    return {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "weights": flat[:: max(1, flat.numel() // 200)].tolist(),
        "trained": sum(p.numel() for group in trainer.optimizer.param_groups for p in group["params"]),
        "sharded": any(isinstance(p, DTensor) for p in trainer.model.parameters()),
    }
