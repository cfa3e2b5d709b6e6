"""diffusers: a pipeline whose parts are offloaded, and models that are spread by maps."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMPipeline, DDIMScheduler, DiTPipeline, DiTTransformer2DModel
from images import draw, save_pipeline, unet
from models import report

from accelerate import cpu_offload


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
    report({"pipeline": _pipeline(), "device maps": _mapped()})


if __name__ == "__main__":
    main()
