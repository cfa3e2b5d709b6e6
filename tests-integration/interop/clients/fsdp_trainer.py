"""The transformers Trainer and trl's with `fsdp=` on two gloo ranks, without on one process: losses, whole weights."""

import os
from typing import Any

import torch
from fsdp_sft import sft
from models import QUIET, llama, report, sequences
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.distributed import DistributedConfig

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
BLOCKS = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer", "LlamaRotaryEmbedding"]}


def _adapted() -> Any:
    net = llama()
    torch.manual_seed(3)
    return get_peft_model(net, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def _train(name: str, model: Any, config: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    set_seed(7)
    settings: dict[str, Any] = {
        "output_dir": name,
        "per_device_train_batch_size": 4 // WORLD,
        "num_train_epochs": 1,
        **QUIET,
        **arguments,
    }
    if WORLD > 1:
        settings |= {"fsdp": True, "fsdp_config": config}
    trainer = Trainer(model=model, args=TrainingArguments(**settings), train_dataset=sequences(20))
    adapters = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    trainer.train()
    assert trainer.optimizer is not None
    trained = sum(p.numel() for group in trainer.optimizer.param_groups for p in group["params"])
    state = trainer.accelerator.get_state_dict(trainer.model)
    flat = torch.cat([tensor.float().reshape(-1) for _, tensor in sorted(state.items())]) if state else torch.zeros(1)
    return {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "norms": [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row],
        "weights": flat[:: max(1, flat.numel() // 200)].tolist(),
        "trained": trained,
        "adapters": adapters,
        "sharded": any(isinstance(p, DTensor) for p in trainer.model.parameters()),
    }


def _arrived() -> dict[str, Any]:
    """Train a model that transformers sharded while it loaded it."""
    AcceleratorState._reset_state(True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT") if WORLD > 1 else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if accelerator.is_main_process:
        llama().save_pretrained("arrived")
    accelerator.wait_for_everyone()
    sharding = {"distributed_config": DistributedConfig(fsdp_size=WORLD)} if WORLD > 1 else {}
    net: Any = LlamaForCausalLM.from_pretrained("arrived", **sharding)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    rows, losses, norms = sequences(4), [], []
    part = slice(accelerator.process_index * 4 // WORLD, (accelerator.process_index + 1) * 4 // WORLD)
    batch = {name: torch.stack([row[name] for row in rows])[part] for name in rows[0]}
    for _ in range(3):
        loss = net(**batch).loss
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    state = accelerator.get_state_dict(net)
    flat = torch.cat([tensor.reshape(-1) for _, tensor in sorted(state.items())]) if state else torch.zeros(1)
    sharded = isinstance(next(net.parameters()), DTensor)
    return {"losses": losses, "norms": norms, "weights": flat[:: max(1, len(flat) // 200)].tolist(), "sharded": sharded}


def main() -> None:
    """Run every case and print what came out."""
    report(
        {
            "version 2": _train("two", llama(), {**BLOCKS}),
            "accumulation": _train("several", llama(), {"reshard_after_forward": False}, gradient_accumulation_steps=3),
            "recomputed": _train("recomputed", llama(), {"activation_checkpointing": True}),
            "version 1": _train("one", llama(), {"version": 1, **BLOCKS}),
            "adapters": _train("adapters", _adapted(), {}),
            "adapters, version 1": _train("adapters1", _adapted(), {"version": 1}),
            "arrived": _arrived(),
            "sft": sft("sft", adapters=False),
            "sft of adapters": sft("sft_adapters", adapters=True),
        }
    )


if __name__ == "__main__":
    main()
