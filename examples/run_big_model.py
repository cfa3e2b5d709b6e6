"""Run the trained model as if it did not fit: part of it on the CPU, the rest read from disk as it is needed.

    accel launch --cpu --num-processes 2 examples/train_digits.py
    python examples/run_big_model.py

Loads the sharded safetensors that training left into an empty model, and compares its predictions with those of the
same model held in memory, bit by bit.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file

from accel_bigmodel import compute_module_sizes, infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch
from digits import DigitNet, datasets, table

BLOCK = "Residual"  # a block has a way around it, so it stays in one place


def main() -> None:
    """Place, load, predict, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/digits"), help="where the training left its weights")
    args = parser.parse_args()
    checkpoint = args.folder / "model"
    _, test = datasets()
    images, labels = test.tensors

    with init_empty_weights():
        model = DigitNet()
    sizes = compute_module_sizes(model)
    room = {"cpu": int(sizes[""] * 0.6)}
    placement = infer_auto_device_map(model, max_memory=room, no_split_module_classes=[BLOCK])
    assert set(placement.values()) == {"cpu", "disk"}, f"the model should be on cpu and on disk, and is on {placement}"
    model = load_checkpoint_and_dispatch(
        model, checkpoint, device_map=placement, offload_folder=args.folder / "offload", no_split_module_classes=[BLOCK]
    )
    with torch.no_grad():
        scores = model(images)

    plain = DigitNet()
    for file in checkpoint.glob("*.safetensors"):
        plain.load_state_dict(load_file(file), strict=False)
    with torch.no_grad():
        expected = plain(images)
    same = torch.equal(scores, expected)
    accuracy = (scores.argmax(1) == labels).float().mean().item()

    rows: dict[str, object] = {"model": f"{sizes[''] / 1024:.0f} KiB, room for {room['cpu'] / 1024:.0f} KiB on the CPU"}
    for device in ("cpu", "disk"):
        parts = [name for name, place in placement.items() if place == device]
        size = sum(sizes[name] for name in parts)
        rows[f"on {device}"] = f"{', '.join(parts)} ({size / 1024:.0f} KiB)"
    rows["test accuracy"] = f"{accuracy:.4f} over {len(labels)} digits"
    rows["equal to the model in memory"] = f"{same}, bit for bit, {scores.numel():,} scores"
    assert same, "the model on CPU and disk predicts something else than the model in memory"
    print(table("run from CPU and disk", rows))


if __name__ == "__main__":
    main()
