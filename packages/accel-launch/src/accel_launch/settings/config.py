"""Configurations as Python objects, read and written as YAML or JSON."""

import dataclasses
import enum
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from accel_core.errors import ConfigurationError
from accel_core.host import environ
from accel_core.options.enums import PRECISIONS, ComputeEnvironment, DistributedType, SageMakerDistributedType
from accel_launch.settings.devices import count_gpus
from accel_launch.settings.file import load, write
from accel_launch.settings.location import default_yaml_file

_Kind = TypeVar("_Kind", bound="BaseConfig")

SAGEMAKER_PYTHON_VERSION = "py38"
SAGEMAKER_PYTORCH_VERSION = "1.10.2"
SAGEMAKER_TRANSFORMERS_VERSION = "4.17.0"


@dataclass
class BaseConfig:
    """What every configuration has."""

    compute_environment: ComputeEnvironment
    distributed_type: DistributedType | SageMakerDistributedType
    mixed_precision: str
    use_cpu: bool
    debug: bool

    def to_dict(self) -> dict[str, Any]:
        """Return what a file holds: plain values, without unset values and empty groups."""
        found = {}
        for key, value in dataclasses.asdict(self).items():
            plain = value.value if isinstance(value, enum.Enum) else value
            if plain is not None and plain != {}:
                found[key] = plain
        return found

    @staticmethod
    def process_config(config_dict: dict[str, Any]) -> dict[str, Any]:
        """Add the keys that a file may leave out."""
        found = {
            "compute_environment": ComputeEnvironment.LOCAL_MACHINE.value,
            "distributed_type": DistributedType.NO.value,
            "mixed_precision": "no",
            "use_cpu": False,
            "debug": False,
            **config_dict,
        }
        if found["mixed_precision"] is False:  # YAML reads the word no as false
            found["mixed_precision"] = "no"
        if found["distributed_type"] is False:
            found["distributed_type"] = "NO"
        return found

    @classmethod
    def from_json_file(cls, json_file: str | Path | None = None) -> "BaseConfig":
        """Read a configuration written as JSON."""
        return cls.of(_written(json_file))

    @classmethod
    def from_yaml_file(cls, yaml_file: str | Path | None = None) -> "BaseConfig":
        """Read a configuration written as YAML."""
        return cls.of(_written(yaml_file))

    @classmethod
    def of(cls: type[_Kind], config: dict[str, Any]) -> _Kind:
        """Return the configuration that a file's keys and values make; keys that it does not have are left out."""
        values = cls.process_config(config)
        values.pop("schema", None)
        names = {field.name for field in dataclasses.fields(cls)}
        required = [field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]
        missing = [name for name in required if values.get(name) is None]
        if missing:
            raise ConfigurationError(
                f"A configuration of this kind needs {', '.join(required)}; got no {', no '.join(missing)}. Write "
                "one with `accel config`."
            )
        return cls(**{key: value for key, value in values.items() if key in names})

    def to_json_file(self, json_file: str | Path) -> None:
        """Write the configuration as JSON."""
        Path(json_file).write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def to_yaml_file(self, yaml_file: str | Path) -> None:
        """Write the configuration as YAML."""
        Path(yaml_file).write_text(yaml.safe_dump(self.to_dict()), encoding="utf-8")

    def __post_init__(self) -> None:
        """Turn texts into the enumerations that they name."""
        self.compute_environment = ComputeEnvironment(self.compute_environment)
        if isinstance(self.distributed_type, str):
            kind: Any = DistributedType
            if self.compute_environment == ComputeEnvironment.AMAZON_SAGEMAKER:
                kind = SageMakerDistributedType
            self.distributed_type = kind(self.distributed_type)


@dataclass
class ClusterConfig(BaseConfig):
    """Configuration of a run on your own machines; fields are the keys of the file."""

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] | None = None


@dataclass
class SageMakerConfig(BaseConfig):
    """Configuration of a job on Amazon SageMaker; fields are the keys of the file."""

    ec2_instance_type: str
    iam_role_name: str
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = f"accelerate-sagemaker-{num_machines}"
    pytorch_version: str = SAGEMAKER_PYTORCH_VERSION
    transformers_version: str = SAGEMAKER_TRANSFORMERS_VERSION
    py_version: str = SAGEMAKER_PYTHON_VERSION
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] | None = None
    enable_cpu_affinity: bool = False


def load_config_from_file(config_file: str | Path | None) -> BaseConfig:
    """Read a configuration file into an object."""
    return config_of(_written(config_file))


def config_of(config: dict[str, Any]) -> BaseConfig:
    """Return the keys and values of a file as an object of its kind."""
    sagemaker = config.get("compute_environment") == ComputeEnvironment.AMAZON_SAGEMAKER.value
    return (SageMakerConfig if sagemaker else ClusterConfig).of(config)


def _written(path: str | Path | None) -> dict[str, Any]:
    file = load(path)
    if file is None:
        raise ConfigurationError("There is no default configuration file. Write one with `accel config`.")
    return file.config


DEFAULT_FILE = str(default_yaml_file())
"""The default configuration file, as the environment said when this module was imported."""


def write_basic_config(mixed_precision: str = "no", save_location: str = DEFAULT_FILE) -> Path | bool:
    """Write a configuration for this machine with its most usual settings.

    Args:
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        save_location: The file.

    Returns:
        The file, or False where it exists already and was left alone.

    Raises:
        ConfigurationError: The precision is unknown, or the file cannot be written.

    Examples:
        >>> write_basic_config("bf16", save_location="basic.yaml")
        PosixPath('...basic.yaml')
    """
    path = Path(save_location)
    if path.exists():
        return False
    write(basic_config(mixed_precision).to_dict(), path)
    return path


def basic_config(mixed_precision: str = "no") -> ClusterConfig:
    """Return the most usual settings of this machine."""
    gpus = count_gpus(environ.snapshot())
    precision = mixed_precision.lower()
    if precision not in PRECISIONS:
        raise ConfigurationError(f"Mixed precision cannot be {mixed_precision!r}. Use one of {', '.join(PRECISIONS)}.")
    return ClusterConfig(
        compute_environment=ComputeEnvironment.LOCAL_MACHINE,
        distributed_type=DistributedType.MULTI_GPU if gpus > 1 else DistributedType.NO,
        mixed_precision=precision,
        use_cpu=gpus == 0,
        debug=False,
        num_processes=max(1, gpus),
    )
