"""The Trainer on ranks that share sequences (two), or products and shards (four), and on one process: what it logs."""

from typing import Any

import torch
from models import WORLD, llama, logged, report, sequences, settings, some_of
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.distributed import DistributedConfig

from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import ParallelismConfig, TorchContextParallelConfig

SHARDED: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}


def _texts(count: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences of which a part counts: more tokens on one rank than on the other."""
    found = []
    for place, text in enumerate(sequences(count)):
        labels = text["labels"].clone()
        labels[: place % 6] = -100
        found.append({**text, "labels": labels})
    return found


def _train(name: str, net: Any, replicas: int = 1, **given: Any) -> dict[str, Any]:
    """Train on batches of four of all replicas together."""
    AcceleratorState._reset_state(True)
    set_seed(7)
    batches = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), 4 // replicas)
    given |= {"gradient_accumulation_steps": 2, "num_train_epochs": 2, "max_grad_norm": 0.5, "eval_strategy": "epoch"}
    arguments = TrainingArguments(**settings(name, **batches, **given))
    trainer = Trainer(model=net, args=arguments, train_dataset=_texts(20), eval_dataset=_texts(8))
    trainer.train()
    return {
        **logged(trainer, losses="loss", evaluated="eval_loss", norms="grad_norm"),
        "weights": some_of(trainer.accelerator.get_state_dict(trainer.model)),
        "axes": {"tp": trainer.get_tp_size(), "cp": trainer.get_cp_size()},
        "spread": any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters()),
    }


def _along_sequences(how: str) -> dict[str, Any]:
    """Share sequences between two ranks."""
    handler = TorchContextParallelConfig(how)
    return {"parallelism_config": ParallelismConfig(cp_size=2, cp_handler=handler)}


def _arrived() -> Any:
    """Return a model that transformers split and sharded while it loaded it."""
    if PartialState(cpu=True).is_main_process:
        llama().save_pretrained("whole")
    PartialState().wait_for_everyone()
    return LlamaForCausalLM.from_pretrained("whole", distributed_config=DistributedConfig(tp_size=2, fsdp_size=2))


def _cases() -> dict[str, Any]:
    if WORLD == 1:
        return {"one": _train("one", llama())}
    if WORLD == 2:
        shares = {"parallelism_config": ParallelismConfig(cp_size=2)}
        return {
            "cp2": _train("gathered", llama(), **_along_sequences("allgather")),
            "cp2 in a ring": _train("ring", llama(), **_along_sequences("alltoall")),
            "fsdp2 over cp2": _train("sharded", llama(), **shares, **SHARDED),
        }
    both = {"parallelism_config": ParallelismConfig(dp_shard_size=2, tp_size=2)}
    return {
        "fsdp2 x tp2": _train("both", llama(), 2, **both, **SHARDED),
        "fsdp2 x tp2, arrived": _train("arrived", _arrived(), 2, **SHARDED),
    }


if __name__ == "__main__":
    report(_cases())
