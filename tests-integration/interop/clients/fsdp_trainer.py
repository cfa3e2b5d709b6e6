"""The transformers Trainer and trl's with `fsdp=` on two gloo ranks, without on one process: losses, whole weights."""

from typing import Any

import torch
from fsdp_sft import sft
from models import WORLD, adapted, llama, logged, report, sequences, settings, some_of
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.distributed import DistributedConfig

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin

BLOCKS = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer", "LlamaRotaryEmbedding"]}


def _train(name: str, model: Any, config: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    set_seed(7)
    shards = {"fsdp": True, "fsdp_config": config} if WORLD > 1 else {}
    given = TrainingArguments(**settings(name, **shards, **arguments))
    trainer = Trainer(model=model, args=given, train_dataset=sequences(20))
    adapters = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    trainer.train()
    assert trainer.optimizer is not None
    trained = sum(p.numel() for group in trainer.optimizer.param_groups for p in group["params"])
    return {
        **logged(trainer, losses="loss", norms="grad_norm"),
        "weights": some_of(trainer.accelerator.get_state_dict(trainer.model)),
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
    sharded, weights = isinstance(next(net.parameters()), DTensor), some_of(accelerator.get_state_dict(net))
    return {"losses": losses, "norms": norms, "weights": weights, "sharded": sharded}


if __name__ == "__main__":
    report(
        {
            "version 2": _train("two", llama(), {**BLOCKS}),
            "accumulation": _train("several", llama(), {"reshard_after_forward": False}, gradient_accumulation_steps=3),
            "recomputed": _train("recomputed", llama(), {"activation_checkpointing": True}),
            "version 1": _train("one", llama(), {"version": 1, **BLOCKS}),
            "adapters": _train("adapters", adapted(), {}),
            "adapters, version 1": _train("adapters1", adapted(), {"version": 1}),
            "arrived": _arrived(),
            "sft": sft("sft", adapters=False),
            "sft of adapters": sft("sft_adapters", adapters=True),
        }
    )
