"""What `accel env` shows: versions, devices, engines, variables and configuration. Imports torch."""

import argparse
import json
import os
import platform
from importlib.metadata import distributions
from typing import Any

import torch

from accel_core.host import environ
from accel_launch.settings.configured import load_if_any
from accel_launch.settings.engines import describe, engine_rows

_PREFIXES = (
    "ACCEL_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_",
    "OMP_", "CUDA_VISIBLE", "NCCL_", "GLOO_",
)  # fmt: skip
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def environment_report() -> dict[str, Any]:
    """Gather versions, devices and variables."""
    versions = {
        dist.metadata["Name"]: dist.version
        for dist in distributions()
        if dist.metadata["Name"] and dist.metadata["Name"].startswith("accel")
    }
    found: dict[str, Any] = {f"{name} version": version for name, version in sorted(versions.items())}
    found |= {
        "Platform": platform.platform(),
        "Python version": platform.python_version(),
        "PyTorch version": str(torch.__version__),
        "CPU cores": os.cpu_count(),
        "System RAM": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.2f} GiB",
        "Accelerator": str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "none",
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
    """Print the report."""
    found = environment_report()
    file = load_if_any(args.config_file)
    configuration = {} if file is None else file.config
    if args.json:
        facts = {"facts": found, "engines": engine_rows()}
        print(json.dumps({**facts, "environment": _variables(), "configuration": configuration}, indent=2))
        return 0
    print("\nCopy and paste the text below into your report:\n")
    for name, value in found.items():
        print(f"- {name}: {value}")
    print("- Engines:")
    for engine in engine_rows():
        print(f"\t- {engine['name']}: {describe(engine)}")
    variables = _variables()
    print("- Environment:" + ("" if variables else " nothing that concerns accel"))
    for name, value in variables.items():
        print(f"\t- {name}: {value}")
    print("- Configuration:" + ("" if configuration else " none"))
    for name, value in configuration.items():
        print(f"\t- {name}: {value}")
    return 0
