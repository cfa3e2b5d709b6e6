"""A Llama of transformers split over two ranks, by transformers or by its own plan, in a loop and by the Trainer."""

from typing import Any

import torch
from models import WORLD, llama, logged, report, sequences, settings, some_of
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.distributed import DistributedConfig

from accelerate import Accelerator, ParallelismConfig, load_checkpoint_in_model
from accelerate.state import AcceleratorState

SPLIT: dict[str, Any] = {"distributed_config": DistributedConfig(tp_size=WORLD)} if WORLD > 1 else {}


def _accelerator() -> Accelerator:
    AcceleratorState._reset_state(True)
    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=WORLD))


def _found(accelerator: Any, net: Any, losses: list[float], norms: list[float]) -> dict[str, Any]:
    return {
        "losses": losses,
        "norms": norms,
        "weights": some_of(accelerator.get_state_dict(net)),
        "split": sorted(name for name, each in net.named_parameters() if isinstance(each, DTensor)),
    }


def _loop(accelerator: Any, net: Any) -> dict[str, Any]:
    """Take steps of two batches each, and clip them."""
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    accelerator.gradient_accumulation_steps = 2
    rows, losses, norms = sequences(8), [], []
    for index in range(6):
        part = rows[index % 2 * 4 :][:4]
        with accelerator.accumulate(net):
            loss = net(**{name: torch.stack([row[name] for row in part]) for name in part[0]}).loss
            accelerator.backward(loss)
            losses.append(float(loss))
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    return _found(accelerator, net, losses, norms)


def _arrived() -> dict[str, Any]:
    """Train a model that transformers split while it loaded it; what is saved loads whole."""
    accelerator = _accelerator()
    if accelerator.is_main_process:
        llama().save_pretrained("whole")
    accelerator.wait_for_everyone()
    net = LlamaForCausalLM.from_pretrained("whole", **SPLIT)
    found = _loop(accelerator, net)
    accelerator.save_model(accelerator._models[0], "saved")
    accelerator.wait_for_everyone()
    again = LlamaForCausalLM.from_pretrained("whole")
    load_checkpoint_in_model(again, "saved")
    return {**found, "saved": some_of(again.state_dict())}


def _trained() -> dict[str, Any]:
    """Let the Trainer train one that transformers split."""
    AcceleratorState._reset_state(True)
    set_seed(7)
    arguments = TrainingArguments(**settings("trainer", per_device_train_batch_size=4))
    net = LlamaForCausalLM.from_pretrained("whole", **SPLIT)
    trainer = Trainer(model=net, args=arguments, train_dataset=sequences(20))
    trainer.train()
    return _found(trainer.accelerator, trainer.model, **logged(trainer, losses="loss", norms="grad_norm"))


if __name__ == "__main__":
    report({"arrived": _arrived(), "own plan": _loop(_accelerator(), llama()), "trainer": _trained()})
