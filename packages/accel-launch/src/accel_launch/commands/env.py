"""`accel env`: what a bug report needs to know."""

import argparse
import json
import os
import platform
from importlib.metadata import distributions
from typing import Any

from accel_launch.command import Command
from accel_launch.settings import environ

__all__ = ["COMMAND", "facts"]

_PREFIXES = (
    "ACCEL_",
    "ACCELERATE_",
    "FSDP_",
    "PARALLELISM_CONFIG_",
    "MEGATRON_LM_",
    "OMP_",
    "CUDA_VISIBLE",
    "NCCL_",
    "GLOO_",
)
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config_file", default=None, help="Configuration file to show instead of the default one.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")


def facts() -> dict[str, Any]:
    """Gather versions, devices and variables.

    Returns:
        Facts by name, in the order of showing.
    """
    import torch

    versions = {
        dist.metadata["Name"]: dist.version
        for dist in distributions()
        if dist.metadata["Name"] and dist.metadata["Name"].startswith("accel")
    }
    found: dict[str, Any] = {f"`{name}` version": version for name, version in sorted(versions.items())}
    found |= {
        "Platform": platform.platform(),
        "Python version": platform.python_version(),
        "PyTorch version": str(torch.__version__),
        "CPU cores": os.cpu_count(),
        "System RAM": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.2f} GiB",
        "Accelerator": str(torch.accelerator.current_accelerator() or "none"),
        "Accelerators": torch.accelerator.device_count(),
    }
    if torch.cuda.is_available():
        found["GPU type"] = torch.cuda.get_device_name()
        found["CUDA version"] = torch.version.cuda
    return found


def _variables() -> dict[str, str]:
    return {
        name: "(hidden)" if any(word in name for word in _SECRET) else value
        for name, value in sorted(environ.snapshot().items())
        if name.startswith(_PREFIXES)
    }


def show_env(args: argparse.Namespace) -> int:
    """Print the facts.

    Args:
        args: Parsed command line: config_file, json.

    Returns:
        0.
    """
    found = facts()
    if args.json:
        print(json.dumps({"facts": found, "environment": _variables()}, indent=2))
        return 0
    print("\nCopy and paste the text below into your report:\n")
    for name, value in found.items():
        print(f"- {name}: {value}")
    variables = _variables()
    print("- Environment:" + ("" if variables else " nothing that concerns accel"))
    for name, value in variables.items():
        print(f"\t- {name}: {value}")
    return 0


COMMAND = Command("env", "Show versions, devices and configuration, for a bug report.", _add_arguments, show_env)
