"""Quality and size of packed weights on a small trained transformer, beside bitsandbytes by hand.

    python benchmarks/quant.py [--peer PYTHON] [--epochs N]

A transformer encoder is trained on the 1,797 handwritten digits of scikit-learn, each read as 8 rows. It is then loaded
packed in every way, and shown are the relative error of its outputs on the held-out digits and its accuracy there, the
bytes of its weights, the time of a forward, and whether the outputs equal those of the same layers packed with
bitsandbytes alone. accelerate 1.15.0 refuses to do this on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

import bitsandbytes as bnb
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import nn

from accel_bigmodel import init_empty_weights
from accel_core.modules.sizes import tensor_bytes
from accel_quant import BnbQuantizationConfig, load_and_quantize_model

WIDTH = 128
WAYS = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4, scales packed too": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
}


class Block(nn.Module):
    """Attention and two layers."""

    def __init__(self):
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.between = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """Run."""
        batch, length, _ = x.shape
        heads = self.qkv(self.before(x)).view(batch, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*heads.unbind(0))
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Model(nn.Module):
    """A transformer encoder over the rows of an image."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Linear(8, WIDTH)
        self.place = nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x):
        """Run."""
        x = self.rows(x) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def train(epochs):
    """Train the model; return it and the held-out digits."""
    torch.manual_seed(0)
    digits = load_digits()
    order = torch.randperm(len(digits.images))
    images = torch.tensor(digits.images, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for start in range(0, 1437, 64):
            loss = nn.functional.cross_entropy(model(images[start : start + 64]), labels[start : start + 64])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval(), images[1437:], labels[1437:]


def by_hand(model, settings):
    """Pack the same layers with bitsandbytes alone."""
    made = copy.deepcopy(model)
    for block in made.blocks:
        for name in ("qkv", "out", "up", "down"):
            layer = getattr(block, name)
            sizes = (layer.in_features, layer.out_features)
            if "load_in_8bit" in settings:
                packed = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0)
            else:
                packed = bnb.nn.Linear4bit(
                    *sizes,
                    compute_dtype=torch.float32,
                    quant_type=settings["bnb_4bit_quant_type"],
                    compress_statistics=settings.get("bnb_4bit_use_double_quant", False),
                )
                packed.support_avx512bf16_for_cpu = False
            packed.load_state_dict(layer.state_dict())
            setattr(block, name, packed.to("cpu"))
    return made.eval()


@torch.no_grad()
def timed(model, images):
    """Return the outputs and the median seconds of a forward."""
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        outputs = model(images)
        times.append(time.perf_counter() - begin)
    return outputs, statistics.median(times)


def main() -> int:
    """Train, pack, compare, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="not used: accelerate 1.15.0 refuses a CPU")
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    model, images, labels = train(args.epochs)
    reference, seconds = timed(model, images)
    size = sum(map(tensor_bytes, model.parameters()))
    right = (reference.argmax(1) == labels).float().mean().item()
    print("| weights | error of outputs | accuracy | bytes of weights | forward | equal to bitsandbytes by hand |")
    print("|---|---|---|---|---|---|")
    print(f"| float32 | 0 | {right:.4f} | {size:,} | {seconds * 1e3:.1f} ms | |")
    with tempfile.TemporaryDirectory() as folder:
        save_file(model.state_dict(), Path(folder, "model.safetensors"))
        for title, settings in WAYS.items():
            config = BnbQuantizationConfig(
                torch_dtype=torch.float32,
                skip_modules=["rows", "head"],
                **({"bnb_4bit_compute_dtype": "fp32"} if "load_in_4bit" in settings else {}),
                **settings,
            )
            with init_empty_weights():
                empty = Model().eval()
            packed = load_and_quantize_model(empty, config, weights_location=folder)
            outputs, seconds = timed(packed, images)
            hand, _ = timed(by_hand(model, settings), images)
            error = ((outputs - reference).norm() / reference.norm()).item()
            right = (outputs.argmax(1) == labels).float().mean().item()
            bytes_ = sum(map(tensor_bytes, packed.parameters()))
            equal = "yes, every bit" if torch.equal(outputs, hand) else "NO"
            share = f"{bytes_:,} ({bytes_ / size:.0%})"
            print(f"| {title} | {error:.2%} | {right:.4f} | {share} | {seconds * 1e3:.1f} ms | {equal} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
