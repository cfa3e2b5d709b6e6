"""What `accel estimate-memory` does: bytes to run and to train a model, per dtype."""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from accel_bigmodel.arguments import add_arguments
from accel_bigmodel.checkpoint.skeleton import Layer, Part, in_one_line, model_of_config, skeleton_of
from accel_bigmodel.meta import init_empty_weights
from accel_bigmodel.sizes import compute_module_sizes, get_max_layer_size, whole_classes
from accel_core.errors import CheckpointNotFoundError, ConfigurationError, MissingDependencyError
from accel_core.host import environ
from accel_core.host.availability import is_timm_available
from accel_core.modules.sizes import written_size

# Also dtypes that pack several numbers into a byte, whose itemsize says less than their name.
_COUNTED = re.compile(r"torch\.(?:u?int|b?float)(\d+)\w*")


def add_timm_hub_prefix(model_name: str) -> str:
    """Return a name on the hub with the prefix that timm needs."""
    return f"hf-hub:{model_name}" if "/" in model_name and not model_name.startswith("hf-hub:") else model_name


def create_empty_model(
    model_name: str, library_name: str | None, trust_remote_code: bool = False, access_token: str | None = None
) -> nn.Module:
    """Build a model without weights.

    Raises:
        MissingDependencyError: When the library is not installed.
        CheckpointNotFoundError: When neither the library nor the hub gives the model.
        ConfigurationError: When the library is neither of the two.
    """
    if os.path.exists(model_name) and library_name != "timm":
        return skeleton_of(model_name)
    if library_name in (None, "transformers"):
        if access_token is not None and environ.text("HF_TOKEN") is None:  # one that the user has set counts
            environ.write("HF_TOKEN", access_token)
        return model_of_config(model_name, trust_remote_code=trust_remote_code)
    if library_name != "timm":
        raise ConfigurationError(
            f"Library `{library_name}` is not supported yet; got neither transformers nor timm. Name a local "
            "checkpoint."
        )
    return _model_of_timm(model_name)


def _model_of_timm(model_name: str) -> nn.Module:
    if not is_timm_available():
        raise MissingDependencyError(
            "This model needs timm, which is not installed. Install it with `pip install timm`."
        )
    try:
        timm = importlib.import_module("timm")
        with init_empty_weights(include_buffers=True):
            built: nn.Module = timm.create_model(add_timm_hub_prefix(model_name), pretrained=False)
    except ImportError as failure:
        raise MissingDependencyError(
            f"A library that {model_name!r} needs cannot be imported; got: {in_one_line(failure)} Install it."
        ) from failure
    except (OSError, RuntimeError) as failure:
        raise CheckpointNotFoundError(
            f"timm does not build the model; got {model_name!r}: {in_one_line(failure)} Check the name, the "
            "connection and your access to it."
        ) from failure
    return built


def estimate_training_usage(bytes: int, mixed_precision: str, msamp_config: str | None = None) -> dict[str, int]:
    """Return what training a model with Adam takes, without activations."""
    if mixed_precision == "float32":
        return {"model": bytes, "optimizer": 2 * bytes, "gradients": bytes, "step": 4 * bytes}
    if mixed_precision in ("float16", "bfloat16") or msamp_config is not None:
        return {"model": bytes, "optimizer": 2 * bytes, "gradients": bytes + bytes // 2, "step": 2 * bytes}
    return {"model": -1, "optimizer": -1, "gradients": -1, "step": -1}


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """Count a model in several dtypes."""
    known = _counted_dtypes()
    dtypes = {word: word.removeprefix("torch.") for word in args.dtypes}
    for name in dtypes.values():
        if name not in known:
            raise ConfigurationError(
                f"Not a floating point or integer dtype; got {name!r}. Use one of {', '.join(sorted(known))}."
            )
    model = create_empty_model(
        args.model_name, library_name=args.library_name, trust_remote_code=args.trust_remote_code
    )
    whole = list(whole_classes(model))
    if isinstance(model, Part):
        whole.append(Layer.__name__)
    # In float32, whatever the checkpoint is stored in: the dtypes are fractions of it.
    parameters = {name: "float32" for name, tensor in model.named_parameters() if tensor.is_floating_point()}
    sizes = compute_module_sizes(model, special_dtypes=parameters)
    largest = get_max_layer_size(list(model.named_children()), sizes, whole)[0]
    total = sizes[""]
    rows = []
    for word, name in dtypes.items():
        dtype, bits = known[name]
        rows.append([word, largest * bits / 32, total * bits / 32, estimate_training_usage(total, dtype)])
    return rows


def _counted_dtypes() -> dict[str, tuple[str, int]]:
    """Return the names of torch's floating point and integer dtypes: for each the dtype's own name, and its bits."""
    dtypes = {name: str(dtype) for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
    counted = {name: match for name, dtype in dtypes.items() if (match := _COUNTED.fullmatch(dtype)) is not None}
    return {name: (match[0].removeprefix("torch."), int(match[1])) for name, match in counted.items()}


def create_ascii_table(headers: Sequence[str], rows: Sequence[Sequence[Any]], title: str) -> str:
    """Draw a table."""
    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    inner = sum(widths) + 3 * len(widths) - 1
    if len(title) + 2 > inner:
        widths[-1] += len(title) + 2 - inner
        inner = len(title) + 2

    def line(left: str, cross: str, right: str) -> str:
        return left + cross.join("─" * (width + 2) for width in widths) + right

    def text(row: Sequence[str]) -> str:
        return "│" + "│".join(f" {cell.center(width)} " for cell, width in zip(row, widths, strict=True)) + "│"

    drawn = ["┌" + "─" * inner + "┐", f"│{title.center(inner)}│", line("├", "┬", "┤"), text(cells[0])]
    drawn += [line("├", "┼", "┤"), *(text(row) for row in cells[1:]), line("└", "┴", "┘")]
    return "\n".join(drawn)


def estimate_command(args: argparse.Namespace) -> int:
    """Run `accel estimate-memory`."""
    rows = []
    for dtype, largest, total, training in gather_data(args):
        step = max(training.values())
        rows.append([dtype, *map(written_size, (largest, total)), written_size(step) if step >= 0 else "N/A"])
    headers = ["dtype", "Largest Layer", "Total Size", "Training using Adam"]
    sys.stdout.write(create_ascii_table(headers, rows, f"Memory Usage for loading `{args.model_name}`") + "\n")
    return 0


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Make the command's parser."""
    parser: argparse.ArgumentParser
    if subparsers is None:
        parser = argparse.ArgumentParser(description="Estimate how much memory a model needs to run and to train.")
    else:
        parser = subparsers.add_parser("estimate-memory")
    add_arguments(parser)
    parser.set_defaults(func=estimate_command)
    return parser
