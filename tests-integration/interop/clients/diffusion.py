"""diffusers: a training loop as its examples write it, and a pipeline whose parts are placed and offloaded."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMPipeline, DDIMScheduler, DDPMScheduler, DiTPipeline, DiTTransformer2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from images import draw, save_pipeline, unet
from models import digest, report
from torch.nn.functional import mse_loss

from accelerate import Accelerator, cpu_offload
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration, set_seed

logger = get_logger(__name__)


def _loop(precision: str) -> dict[str, Any]:
    accelerator = Accelerator(
        cpu=True,
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
    loader = torch.utils.data.DataLoader(list(images), batch_size=2, shuffle=True)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=6)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    accelerator.register_for_checkpointing(ema)
    losses, rates, synced, step = [], [], [], 0
    for _ in range(2):
        model.train()
        for batch in loader:
            noise = torch.randn_like(batch)
            times = torch.randint(0, 20, (len(batch),))
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
    weights = digest(accelerator.unwrap_model(model))
    accelerator.load_state(str(Path(f"run-{precision}") / "checkpoint"))
    restored = digest(accelerator.unwrap_model(model))
    accelerator.end_training()
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
    return {"losses": losses, "rates": rates, "synced": synced, "weights": weights, "restored": restored}


def _pipeline() -> dict[str, Any]:
    folder = Path("pipeline")
    DDIMPipeline(unet(), DDIMScheduler(num_train_timesteps=20)).save_pretrained(folder)
    whole = DDIMPipeline.from_pretrained(folder)
    whole.set_progress_bar_config(disable=True)
    expected = whole(generator=torch.Generator().manual_seed(1), num_inference_steps=3, output_type="np").images
    offloaded = DDIMPipeline.from_pretrained(folder)
    offloaded.set_progress_bar_config(disable=True)
    cpu_offload(offloaded.unet, execution_device="cpu")
    found = offloaded(generator=torch.Generator().manual_seed(1), num_inference_steps=3, output_type="np").images
    return {"sum": float(expected.sum()), "offloaded": float(found.sum()), "same": bool((found == expected).all())}


def _mapped() -> dict[str, Any]:
    """Spread models over the CPU and the disk, by a map, a word and for a whole pipeline."""
    folder = Path("mapped")
    save_pipeline(folder)
    expected = draw(DiTPipeline.from_pretrained(folder))
    places = {"pos_embed": "cpu", "norm_out": "cpu", "proj_out_1": "cpu", "proj_out_2": "disk"}
    places |= {f"transformer_blocks.{index}": "disk" if index % 2 else "cpu" for index in range(4)}
    transformer = DiTTransformer2DModel.from_pretrained(
        folder / "transformer", device_map=places, offload_folder="offload"
    )
    autoencoder = AutoencoderKL.from_pretrained(folder / "vae", device_map="auto")
    spread = draw(DiTPipeline.from_pretrained(folder, transformer=transformer, vae=autoencoder))
    by_word = draw(DiTPipeline.from_pretrained(folder, device_map="cpu"))
    balanced = DiTPipeline.from_pretrained(folder, device_map="balanced")
    return {
        "sum": float(expected.double().sum()),
        "equal": [torch.equal(found, expected) for found in (spread, by_word, draw(balanced))],
        "placed": sorted({str(tensor.device) for tensor in transformer.parameters()}),
        "chosen": [str(autoencoder.hf_device_map), str(balanced.hf_device_map)],
    }


def main() -> None:
    """Run every case and print what came out."""
    report(
        {
            "loop": _loop("no"),
            "loop in bf16": _loop("bf16"),
            "pipeline": _pipeline(),
            "device maps": _mapped(),
        }
    )


if __name__ == "__main__":
    main()
