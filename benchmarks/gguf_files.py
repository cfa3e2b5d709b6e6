"""GGUF files: loading packed weights, a header with a vocabulary, and unpacking.

    python benchmarks/gguf_files.py [--gib 1.6]

The page cache is warm. Loading is measured up to the moment at which a byte of each page of all weights was read, and
its limit is reading the whole file into memory that is there already. Rows are measured in turns; medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import nn

from accel_bigmodel import init_empty_weights, load_checkpoint_in_model
from accel_bigmodel.gguf.blocks import KINDS, unpack
from accel_bigmodel.offload.index import header_of

WIDTH, ROUNDS, PAGE, WORDS = 4096, 7, 4096, 128_000
PACKED = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")


def rows_of(kind: str) -> np.ndarray:
    """Return one packed matrix of any bytes."""
    values, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return np.random.default_rng(0).integers(0, 60, (WIDTH, WIDTH // values * nbytes), dtype=np.uint8)


def close(writer: gguf.GGUFWriter) -> None:
    """Write what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def in_turns(*functions: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Return the median seconds of each function."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, own in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in times]


def model_of(layers: int) -> nn.Module:
    """Return an empty model."""
    with init_empty_weights():
        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.6)
    parser.add_argument("--peer", help="not used: accelerate 1.15.0 does not read these files")
    gib = parser.parse_args().gib
    print("| what | limit, or gguf | accel | target |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        rows = rows_of("Q8_0")
        layers = int(gib * 2**30 / rows.nbytes)
        writer = gguf.GGUFWriter(path, "own")
        for number in range(layers):
            writer.add_tensor(f"{number}.weight", rows, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        close(writer)
        size = path.stat().st_size
        memory = torch.ones(size, dtype=torch.uint8)

        def limit() -> None:
            with path.open("rb") as file:
                assert file.readinto(memory.numpy()) == size

        def ours() -> None:
            model = model_of(layers)
            load_checkpoint_in_model(model, path)
            for layer in model:
                layer.weight.raw.view(-1)[::PAGE].max()

        limit()
        read, load = in_turns(limit, ours)
        print(
            f"| load of {size / 2**30:.1f} GiB, Q8_0; limit: reading the bytes | {read * 1e3:,.0f} ms | "
            f"{load * 1e3:,.0f} ms ({load / read:.2f} ×) | ≤ 1.2 × |"
        )
        path = Path(folder) / "vocabulary.gguf"
        writer = gguf.GGUFWriter(path, "own")
        writer.add_token_list([f"word {number}" for number in range(WORDS)])
        writer.add_token_merges([f"left {number}" for number in range(2 * WORDS)])
        writer.add_token_types([1] * WORDS)
        writer.add_tensor("weight", np.ones((2, 32), np.float32))
        close(writer)
        theirs, own = in_turns(lambda: gguf.GGUFReader(path), lambda: header_of(path), rounds=1)
        print(f"| header with a vocabulary of {WORDS:,} words | {theirs * 1e3:,.0f} ms | {own * 1e3:,.0f} ms | |")
    for kind in PACKED:
        rows = rows_of(kind)
        raw, number = torch.from_numpy(rows), gguf.GGMLQuantizationType[kind]
        with np.errstate(all="ignore"):
            theirs, own = in_turns(
                lambda r=rows, n=number: gguf.dequantize(r, n), lambda r=raw, k=kind: unpack(r, k, torch.float32)
            )
        print(f"| unpacking {WIDTH} × {WIDTH} of {kind} | {theirs * 1e3:,.0f} ms | {own * 1e3:,.0f} ms | |")
    assert set(PACKED) < set(KINDS)


if __name__ == "__main__":
    sys.exit(main())
