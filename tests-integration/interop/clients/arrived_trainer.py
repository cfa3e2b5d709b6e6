"""The Trainer on models that transformers shards while it loads them, and on one process: logs, resumed, exchanged."""

import gc
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import VOCABULARY, WORLD, logged, report, sequences, settings, some_of
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.distributed import DistributedConfig

from accelerate import PartialState
from accelerate.state import AcceleratorState

DENSE, SPARSE = "dense", "sparse"
KINDS: dict[str, Any] = {DENSE: Qwen3ForCausalLM, SPARSE: Qwen3MoeForCausalLM}
CASES: dict[int, dict[str, tuple[str, dict[str, int] | None, int]]] = {
    1: {"dense": (DENSE, None, 1), "sparse": (SPARSE, None, 1)},
    2: {
        "dp": (DENSE, None, 2),
        "fsdp": (DENSE, {"fsdp_size": 2}, 2),
        "tp": (DENSE, {"tp_size": 2}, 1),
        "ep": (SPARSE, {"fsdp_size": 2, "ep_size": 2}, 2),
    },
    4: {
        "dp": (DENSE, None, 4),
        "fsdp": (DENSE, {"fsdp_size": 4}, 4),
        "tp": (DENSE, {"tp_size": 4}, 1),
        "fsdp x tp": (DENSE, {"fsdp_size": 2, "tp_size": 2}, 2),
        "hsdp": (DENSE, {"fsdp_size": 2, "dp_replicate_size": 2}, 4),
        "ep": (SPARSE, {"fsdp_size": 4, "ep_size": 4}, 4),
        "ep in copies": (SPARSE, {"fsdp_size": 4, "ep_size": 2}, 4),
    },
}


class Checkpoints(TrainerCallback):
    """Loads a checkpoint where training begins, and saves one after two steps."""

    def __init__(self, before: str | None, after: str) -> None:
        self.before, self.after = before, after
        self.trainer: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Read what another run saved."""
        if self.before is not None:
            self.trainer.accelerator.load_state(self.before)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save after the second step."""
        if state.global_step == 2:
            self.trainer.accelerator.save_state(self.after)


def _pretrained() -> None:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).save_pretrained(DENSE)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts)).save_pretrained(SPARSE)


def _load(folder: str, kind: str, sizes: dict[str, int] | None) -> Any:
    given = {} if sizes is None else {"distributed_config": DistributedConfig(**sizes)}
    return KINDS[kind].from_pretrained(folder, dtype=torch.float32, **given)


def _train(name: str, net: Any, replicas: int, before: str | None) -> tuple[dict[str, Any], Any]:
    AcceleratorState._reset_state(True)
    set_seed(7)
    callback = Checkpoints(before, f"{name} saved")
    given = {"gradient_accumulation_steps": 2, "max_steps": 4, "lr_scheduler_type": "constant", "max_grad_norm": 0.5}
    arguments = TrainingArguments(**settings(name, per_device_train_batch_size=4 // replicas, **given))
    trainer = Trainer(model=net, args=arguments, train_dataset=sequences(32), callbacks=[callback])
    callback.trainer = trainer
    trainer.train()
    return logged(trainer, losses="loss", norms="grad_norm"), trainer


def _weights(trainer: Any, net: Any) -> list[float]:
    state = trainer.accelerator.get_state_dict(net)
    return some_of(state) if PartialState().is_main_process else []


def _exchanged(name: str, net: Any, kind: str, sizes: dict[str, int]) -> dict[str, bool]:
    """Read transformers' shards into a new model, and what `save_state` wrote by torch's own reader."""
    expected = net.state_dict()
    net.save_pretrained(f"{name} theirs", distributed_checkpoint=True)
    again = _load(f"{name} theirs", kind, sizes).state_dict()
    read = {key: torch.zeros_like(value) for key, value in expected.items()}
    dcp.load({"model": read}, checkpoint_id=f"{name} last/pytorch_model_fsdp_0")
    return {"theirs": _equal(again, expected), "ours": _equal(read, expected)}


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    parts = [
        [each.to_local() if hasattr(each, "to_local") else each for each in (one[key], other[key])] for key in other
    ]
    return one.keys() == other.keys() and all(torch.equal(*pair) for pair in parts)


def main() -> None:
    """Run the cases of this number of ranks; each goes on from what the one before saved."""
    if PartialState(cpu=True).is_main_process:
        _pretrained()
    PartialState().wait_for_everyone()
    found: dict[str, Any] = {}
    saved: dict[str, str] = {}
    for name, (kind, sizes, replicas) in CASES[WORLD].items():
        straight, trainer = _train(name, _load(kind, kind, sizes), replicas, None)
        straight["weights"] = _weights(trainer, trainer.model)
        if sizes is not None:
            trainer.accelerator.save_state(f"{name} last")
            straight |= _exchanged(name, trainer.model, kind, sizes)
        before = saved.setdefault(kind, f"{name} saved")
        resumed, trainer = _train(f"{name} again", _load(kind, kind, sizes), replicas, before)
        found[name] = {**straight, "resumed": resumed["losses"], "kind": kind}
        saved[kind] = f"{name} saved"
        del trainer
        gc.collect()
    report(found)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


main()
