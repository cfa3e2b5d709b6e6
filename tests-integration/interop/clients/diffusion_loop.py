"""diffusers: a training loop as its examples write it, with a checkpoint."""

from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMScheduler
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from images import unet
from models import CPU, WORLD, report, trained
from torch.nn.functional import mse_loss

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration, set_seed

logger = get_logger(__name__)


def _loop(precision: str) -> dict[str, Any]:
    accelerator = Accelerator(
        cpu=CPU,
        gradient_accumulation_steps=2,
        mixed_precision=precision,
        project_config=ProjectConfiguration(project_dir=f"run-{precision}", total_limit=2),
    )
    set_seed(3)
    model = unet()
    ema = EMAModel(model.parameters())
    noise_scheduler = DDPMScheduler(num_train_timesteps=20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.rand(12, 1, 8, 8)
    loader = torch.utils.data.DataLoader(list(images), batch_size=2 // WORLD, shuffle=True)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=6)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    ema.to(accelerator.device)
    accelerator.register_for_checkpointing(ema)
    losses, rates, synced, step = [], [], [], 0
    for _ in range(2):
        model.train()
        for batch in loader:
            noise = torch.randn(batch.shape).to(batch.device)
            times = torch.randint(0, 20, (len(batch),)).to(batch.device)
            with accelerator.accumulate(model):
                predicted = model(noise_scheduler.add_noise(batch, noise, times), times).sample
                loss = mse_loss(predicted.float(), noise.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().repeat(2)).mean().item())
            rates.append(schedule.get_last_lr()[0])
            synced.append(accelerator.sync_gradients)
            if accelerator.sync_gradients:
                ema.step(model.parameters())
                step += 1
                if step == 3:
                    accelerator.save_state(str(Path(f"run-{precision}") / "checkpoint"))
    accelerator.wait_for_everyone()
    ended = trained(accelerator.unwrap_model(model))
    accelerator.load_state(str(Path(f"run-{precision}") / "checkpoint"))
    restored = trained(accelerator.unwrap_model(model))["weights"]
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    AcceleratorState._reset_state()
    return {"losses": losses, "rates": rates, "synced": synced, "restored": restored, **ended}


if __name__ == "__main__":
    # The simulated accelerator has no autocast.
    report({"loop": _loop("no"), **({"loop in bf16": _loop("bf16")} if CPU else {})})
