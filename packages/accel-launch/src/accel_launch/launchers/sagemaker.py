"""Amazon SageMaker: the description of the job, and its start if the library and an account are available."""

import json
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accel_core.errors import ConfigurationError, MissingDependencyError
from accel_launch.launchers.launcher import Launcher
from accel_launch.settings.reading import read_text
from accel_launch.settings.resolve import Settings

SAGEMAKER_PARALLEL_EC2_INSTANCES = ["ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4dn.24xlarge"]
"""Instances on which SageMaker runs its own data parallelism."""


_DISTRIBUTION = {
    "DATA_PARALLEL": {"smdistributed": {"dataparallel": {"enabled": True}}},
    "MODEL_PARALLEL": {"smdistributed": {"modelparallel": {"enabled": True}}},
}


def hyperparameters(words: Sequence[str]) -> dict[str, Any]:
    """Turn the script's words into SageMaker's hyperparameters."""
    found: dict[str, Any] = {}
    rest = list(words)
    while rest:
        name = rest.pop(0)
        if not name.startswith("-") or not rest or (rest[0].startswith("--")):
            raise ConfigurationError(
                f"SageMaker passes arguments to the script as `--name value` pairs; got {name!r} alone. Give it a "
                f"value, as in `{name} true`."
            )
        found[name.lstrip("-")] = _typed(rest.pop(0))
    return found


def _typed(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) else text


def job_description(settings: Settings, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of SageMaker's estimator for a run."""
    config = settings.config
    for key in ("ec2_instance_type", "iam_role_name"):
        if not config.get(key):
            raise ConfigurationError(
                f"A SageMaker job needs {key}; {settings.file} has none. Write it with `accel config`."
            )
    if settings["module"] or settings["no_python"]:
        raise ConfigurationError("SageMaker starts a Python file; got --module or --no-python. Leave it out.")
    script = Path(str(settings.script))
    kind = str(config.get("distributed_type", "NO"))
    return {
        "image_uri": config.get("image_uri"),
        "entry_point": script.name,
        "source_dir": str(script.parent),
        "role": config["iam_role_name"],
        "transformers_version": config.get("transformers_version"),
        "pytorch_version": config.get("pytorch_version"),
        "py_version": config.get("py_version"),
        "base_job_name": config.get("base_job_name", "accel-sagemaker-1"),
        "instance_count": config.get("num_machines", 1),
        "instance_type": config["ec2_instance_type"],
        "debugger_hook_config": False,
        "distribution": _DISTRIBUTION.get(kind),
        "hyperparameters": hyperparameters(settings.arguments),
        "environment": {
            **environment,
            "ACCELERATE_USE_SAGEMAKER": "true",
            "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": kind,
        },
        "metric_definitions": _table(config.get("sagemaker_metrics_file"), ("Name", "Regex")),
        **(config.get("additional_args") or {}),
    }


def inputs_of(config: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the data channels that the file names."""
    rows = _table(config.get("sagemaker_inputs_file"), ("channel", "data_location"))
    return None if rows is None else {row["channel"]: row["data_location"] for row in rows}


def _table(file: str | None, columns: tuple[str, str]) -> list[dict[str, str]] | None:
    if not file:
        return None
    rows = [line.split("\t") for line in read_text(Path(str(file)), "The table").splitlines()[1:] if line.strip()]
    return [dict(zip(columns, row, strict=True)) for row in rows]


class SageMakerLauncher(Launcher):
    """A training job of Amazon SageMaker."""

    name = "sagemaker"

    def claims(self, settings: Settings) -> bool:
        """Take a run whose configuration file is one for SageMaker."""
        return settings.config.get("compute_environment") == "AMAZON_SAGEMAKER"

    def command(self, settings: Settings) -> list[str]:
        """Return the job in one word: JSON for SageMaker's estimator."""
        return ["sagemaker-job", json.dumps(job_description(settings, self.environ(settings)), sort_keys=True)]

    def run(self, settings: Settings) -> int:
        """Send the job."""
        job = job_description(settings, self.environ(settings))
        if find_spec("sagemaker") is None:
            raise MissingDependencyError(
                "Sending a SageMaker job needs the library `sagemaker` and an AWS account; the library is not "
                "installed. Install it; `--dry-run` shows the job without sending it."
            )
        from sagemaker.huggingface import HuggingFace

        HuggingFace(**job).fit(inputs=inputs_of(settings.config))
        return 0
