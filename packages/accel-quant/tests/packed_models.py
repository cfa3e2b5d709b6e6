"""A small model whose blocks can be packed, and what bitsandbytes alone makes of it."""

from __future__ import annotations

import copy
from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn

from accel_quant import BnbQuantizationConfig


class Block(nn.Module):
    """A norm and two layers, of sizes that are no power of two unless others are given."""

    def __init__(self, width: int = 32, inner: int = 72) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add something."""
        found: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return found


class Model(nn.Module):
    """A small model with a buffer."""

    def __init__(self, width: int = 32, inner: int = 72, blocks: int = 2) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(blocks))
        self.head = nn.Linear(width, 16)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, index: Tensor) -> Tensor:
        """Return logits."""
        x = self.emb(index) * self.scale
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


def by_hand(trained: Model, settings: BnbQuantizationConfig, device: str | torch.device = "cpu") -> nn.Module:
    """Pack the same layers with bitsandbytes alone."""
    model = copy.deepcopy(trained).to(settings.torch_dtype)
    for block in model.blocks:
        for leaf in ("up", "down"):
            layer: nn.Linear = getattr(block, leaf)
            size = layer.in_features, layer.out_features, layer.bias is not None
            made: Any
            if settings.load_in_8bit:
                made = bnb.nn.Linear8bitLt(*size, has_fp16_weights=False, threshold=settings.llm_int8_threshold)
            else:
                made = bnb.nn.Linear4bit(
                    *size,
                    compute_dtype=settings.bnb_4bit_compute_dtype,
                    quant_type=settings.bnb_4bit_quant_type,
                    compress_statistics=settings.bnb_4bit_use_double_quant,
                )
                made.support_avx512bf16_for_cpu = False
            made.load_state_dict(layer.state_dict())
            made.weight.data = made.weight.data.to(settings.torch_dtype)
            if layer.bias is not None:
                made.bias.data = made.bias.data.to(settings.torch_dtype)
            setattr(block, leaf, made)
    return model.eval().to(device)
