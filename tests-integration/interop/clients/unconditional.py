"""Trains with diffusers' own `train_unconditional.py`, unmodified, as its README says, and goes on from its checkpoint.

`ACCEL_SCRIPTS` names the folder that the script lies in.
"""

import hashlib
import json
import os
import random
import runpy
import sys
from pathlib import Path

import numpy
import torch
from diffusers import UNet2DModel
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

OUTPUT, IMAGES, CONFIG = Path("model"), Path("pictures"), Path("unet")
ARGUMENTS = {
    "train_data_dir": IMAGES,
    "model_config_name_or_path": CONFIG,
    "output_dir": OUTPUT,
    "cache_dir": "cache",
    "resolution": 16,
    "train_batch_size": 2,
    "eval_batch_size": 1,
    "save_images_epochs": 1,
    "save_model_epochs": 1,
    "ddpm_num_inference_steps": 3,
    "lr_warmup_steps": 2,
    "checkpointing_steps": 3,
    "checkpoints_total_limit": 2,
}
EPOCHS = {"train": 2, "resume": 4}


def make() -> None:
    """Write the pictures to learn, and the configuration of a small model with random weights."""
    IMAGES.mkdir()
    generator = numpy.random.default_rng(0)
    for number in range(13):
        pixels = generator.integers(0, 255, (20, 20, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(IMAGES / f"{number:02}.png")
    UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).save_config(CONFIG)


def main() -> None:
    """Run one phase, and print losses, rates, files and digests of weights."""
    phase = sys.argv[1]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    first = os.environ.get("RANK", "0") == "0"
    if phase == "make":
        if first:
            make()
            print("{}")
        return
    words = [word for name, value in ARGUMENTS.items() for word in (f"--{name}", str(value))]
    resume = ["--resume_from_checkpoint", "latest"] if phase == "resume" else []
    script = str(Path(os.environ["ACCEL_SCRIPTS"]) / "train_unconditional.py")
    sys.argv = [script, *words, "--use_ema", "--num_epochs", str(EPOCHS[phase]), *resume]
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)
    runpy.run_path(script, run_name="__main__")
    if first:
        print(json.dumps(found()))


def found() -> dict[str, object]:
    """Return what the run left, of both phases."""
    logged: dict[str, list[float]] = {"loss": [], "lr": [], "step": []}
    for path in sorted(OUTPUT.glob("logs/**/events*"), key=lambda path: path.stat().st_mtime):
        events = EventAccumulator(str(path)).Reload()
        for name in logged.keys() & set(events.Tags()["scalars"]):
            logged[name] += [event.value for event in events.Scalars(name)]
    files = sorted(str(path.relative_to(OUTPUT)) for path in OUTPUT.rglob("*") if path.is_file())
    weights = {
        name: hashlib.sha256((OUTPUT / name).read_bytes()).hexdigest() for name in files if name.endswith("safetensors")
    }
    return {**logged, "files": [name for name in files if not name.startswith("logs/")], "weights": weights}


if __name__ == "__main__":
    main()
