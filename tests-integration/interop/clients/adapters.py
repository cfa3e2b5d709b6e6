"""peft: an adapter over a frozen model, trained in a loop as peft's examples write it, saved and loaded on the way."""

from pathlib import Path
from typing import Any

import torch
from models import CPU, WORLD, llama, report, sequences, trained
from peft import LoraConfig, TaskType, get_peft_model, get_peft_model_state_dict
from torch.utils.data import DataLoader
from transformers import default_data_collator, get_linear_schedule_with_warmup, set_seed

from accelerate import Accelerator
from accelerate.state import AcceleratorState


def _train(precision: str, **config: Any) -> dict[str, Any]:
    accelerator = Accelerator(cpu=CPU, mixed_precision=precision, gradient_accumulation_steps=2)
    set_seed(5)
    model = get_peft_model(
        llama(), LoraConfig(task_type=TaskType.CAUSAL_LM, r=2, target_modules=["q_proj", "v_proj"], **config)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(sequences(16), batch_size=2 // WORLD, shuffle=True, collate_fn=default_data_collator)
    schedule = get_linear_schedule_with_warmup(optimizer, 1, 8)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []

    def epoch() -> None:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())

    epoch()
    folder = Path(f"state-{precision}-{'-'.join(config)}")
    accelerator.save_state(str(folder))
    epoch()
    adapter = get_peft_model_state_dict(accelerator.unwrap_model(model))
    ended = trained(accelerator.unwrap_model(model))
    accelerator.load_state(str(folder))
    restored = trained(accelerator.unwrap_model(model))["weights"]
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    AcceleratorState._reset_state()
    return {"losses": losses, "restored": restored, "adapter": sorted(adapter), **ended}


if __name__ == "__main__":
    found = {"lora": _train("no"), "dora": _train("no", use_dora=True)}
    # The simulated accelerator has no autocast.
    report({**found, "dropout in bf16": _train("bf16", lora_dropout=0.2)} if CPU else found)
