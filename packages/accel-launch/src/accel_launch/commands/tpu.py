"""`accel tpu-config`: run commands on every machine of a TPU pod before training."""

import argparse
import shlex
import subprocess
from pathlib import Path
from typing import Any

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_launch.command import Command
from accel_launch.settings.configured import load_if_any
from accel_launch.settings.reading import read_text


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config_file", help="Configuration that names the pod.")
    parser.add_argument("--tpu_name", help="Name of the pod.")
    parser.add_argument("--tpu_zone", help="Zone of the pod.")
    parser.add_argument("--use_alpha", action="store_true", help="Use `gcloud alpha`.")
    parser.add_argument("--command_file", help="File with one command per line.")
    parser.add_argument("--command", action="append", nargs="+", help="Command to run; may be repeated.")
    parser.add_argument("--install_accelerate", action="store_true", help="Install the training library first.")
    parser.add_argument("--accelerate_version", default="latest", help="Its version: latest, dev or a number.")
    parser.add_argument("--debug", action="store_true", help="Print the command instead of running it.")


def pod_command(args: argparse.Namespace, config: dict[str, Any]) -> list[str]:
    """Return the gcloud command line that reaches every machine of the pod."""
    name, zone = args.tpu_name or config.get("tpu_name"), args.tpu_zone or config.get("tpu_zone")
    for key, value in (("tpu_name", name), ("tpu_zone", zone)):
        if not value:
            raise ConfigurationError(
                f"A pod is reached by its name and zone; got no {key}. Pass --{key.replace('_', '-')}."
            )
    commands = [" ".join(words) for words in args.command or []]
    file = args.command_file or config.get("command_file")
    if file and not commands:
        found = read_text(Path(str(file)), "The file of commands")
        commands = [line for line in found.splitlines() if line.strip()]
    commands = commands or [str(line) for line in config.get("commands") or []]
    if not commands:
        raise ConfigurationError("No command to run on the pod was given. Pass --command or --command-file.")
    if args.install_accelerate:
        version = args.accelerate_version
        wanted = {
            "latest": "accelerate -U",
            "dev": "git+https://github.com/huggingface/accelerate.git",
        }.get(version, f"accelerate=={version}")
        commands.insert(0, f"pip install {wanted}")
    words = ["gcloud", *(["alpha"] if args.use_alpha else []), "compute", "tpus", "tpu-vm", "ssh", str(name)]
    return [*words, "--zone", str(zone), "--command", "; ".join(["cd /usr/share", *commands]), "--worker", "all"]


def _run(args: argparse.Namespace) -> int:
    file = load_if_any(args.config_file or None)
    command = pod_command(args, {} if file is None else file.config)
    if args.debug:
        print(f"Running {shlex.join(command)}")
        return 0
    try:
        status = subprocess.run(command, check=False).returncode
    except FileNotFoundError:
        raise MissingDependencyError(
            "A pod is reached with gcloud; it is not on PATH. Install the Google Cloud CLI, or pass --debug to see "
            "the command."
        ) from None
    print("The pod is set up." if status == 0 else f"gcloud ended with status {status}.")
    return status


COMMAND = Command("tpu-config", "Run commands on every machine of a TPU pod before training.", _add_arguments, _run)
