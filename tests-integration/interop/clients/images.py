"""Small diffusion models with random weights from a seed."""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMPipeline, DDIMScheduler, DiTPipeline, DiTTransformer2DModel, UNet2DModel


def unet() -> UNet2DModel:
    """Return a UNet of two levels for 8 × 8 images."""
    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
    )


def save_pipeline(folder: Path) -> None:
    """Save a pipeline of a diffusion transformer with four blocks and an autoencoder."""
    torch.manual_seed(0)
    transformer = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=4, sample_size=4,
        patch_size=2, norm_num_groups=4,
    )  # fmt: skip
    autoencoder = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=4)
    DiTPipeline(transformer, autoencoder, DDIMScheduler(num_train_timesteps=20)).save_pretrained(folder)


def draw(pipeline: DiTPipeline | DDIMPipeline) -> torch.Tensor:
    """Return the image that three steps draw from a fixed noise."""
    pipeline.set_progress_bar_config(disable=True)
    label = {"class_labels": [1]} if isinstance(pipeline, DiTPipeline) else {}
    generator = torch.Generator().manual_seed(1)
    images = pipeline(**label, generator=generator, num_inference_steps=3, output_type="np").images
    return torch.as_tensor(images)
