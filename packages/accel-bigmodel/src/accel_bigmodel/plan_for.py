"""What `accel plan` does."""

import argparse
import re
import sys
from pathlib import Path

import torch

from accel_bigmodel.checkpoint.skeleton import Layer, Part, model_of_config, skeleton_of
from accel_bigmodel.device_map.headroom import Workload, activation_bytes
from accel_bigmodel.device_map.result import Plan, plan_device_map
from accel_core.errors import ConfigurationError
from accel_core.modules.sizes import as_dtype, written_size

__all__ = ["headroom_of", "max_memory_of", "plan_checkpoint", "run"]


def max_memory_of(text: str | None) -> dict[int | str, int | str] | None:
    """Read limits as they are written on a command line.

    Args:
        text: `0=24GiB,cpu=64GiB`, or None.

    Returns:
        Written sizes by device; None stays None.

    Raises:
        ConfigurationError: When a part is not `DEVICE=SIZE`.
    """
    if text is None:
        return None
    limits: dict[int | str, int | str] = {}
    for part in text.split(","):
        device, equals, size = (piece.strip() for piece in part.partition("="))
        if not equals or not device or not size:
            raise ConfigurationError(
                f"Limits are written as DEVICE=SIZE, separated by commas. Found {part!r}. Write for example "
                "0=24GiB,cpu=64GiB."
            )
        limits[int(device) if device.isdecimal() else device] = int(size) if size.isdecimal() else size
    return limits


def headroom_of(text: str | None, source: str, dtype: str | None = None) -> int | float | str | None:
    """Read headroom as it is written on a command line.

    Args:
        text: Bytes, a written size, a fraction, or BATCHxSEQUENCE, which is traced through the model that the
            configuration beside the checkpoint describes; or None.
        source: The checkpoint.
        dtype: The dtype that the weights will be loaded in.

    Returns:
        Bytes, a fraction or a written size; None stays None.

    Raises:
        ConfigurationError: When a workload is given, and there is no configuration or its model cannot be traced.
    """
    if text is None:
        return None
    workload = re.fullmatch(r"\s*(\d+)\s*[x×]\s*(\d+)\s*", text)
    if workload is not None:
        path = Path(source)
        folder = path if path.is_dir() else path.parent
        if not (folder / "config.json").is_file():
            raise ConfigurationError(
                "Headroom for a batch of sequences is traced through the model itself. Found no config.json in "
                f"{str(folder)!r}, and headers tell nothing of the forward. Give the headroom as a size or a fraction."
            )
        wanted = as_dtype(dtype)
        return activation_bytes(
            model_of_config(folder),
            Workload(int(workload[1]), int(workload[2])),
            wanted if isinstance(wanted, torch.dtype) else None,
        )
    if text.replace(".", "", 1).isdecimal():
        return float(text) if "." in text else int(text)
    return text


def plan_checkpoint(
    source: str,
    max_memory: str | None = None,
    headroom: str | None = None,
    dtype: str | None = None,
    balanced: bool = False,
    no_split: list[str] | None = None,
) -> Plan:
    """Plan a checkpoint from its headers.

    Args:
        source: A safetensors file, an index, a folder, or a folder with a transformers config.
        max_memory: Limits, as on the command line.
        headroom: Headroom, as on the command line.
        dtype: The dtype that the weights will be loaded in.
        balanced: Whether accelerators share evenly.
        no_split: Class names that are not split; numbered layers of a checkpoint never are.

    Returns:
        The plan.
    """
    model = skeleton_of(source)
    classes = list(no_split or getattr(model, "_no_split_modules", None) or ())
    if isinstance(model, Part):
        classes.append(Layer.__name__)
    return plan_device_map(
        model,
        max_memory_of(max_memory),
        headroom=headroom_of(headroom, source, dtype),
        no_split_module_classes=classes,
        dtype=dtype,
        balanced=balanced,
    )


def run(args: argparse.Namespace) -> int:
    """Carry `accel plan` out.

    Args:
        args: The parsed arguments.

    Returns:
        0.
    """
    plan = plan_checkpoint(args.checkpoint, args.max_memory, args.headroom, args.dtype, args.balanced, args.whole)
    lines = [f"{args.checkpoint}: {written_size(plan.nbytes)} of weights", "", plan.table(), ""]
    lines += [plan.explain(share.device) for share in plan.shares if share.weights]
    sys.stdout.write("\n".join(lines) + "\n")
    if args.svg:
        Path(args.svg).write_text(plan.svg(), encoding="utf-8")
    if args.json:
        Path(args.json).write_text(plan.to_json(), encoding="utf-8")
    return 0
