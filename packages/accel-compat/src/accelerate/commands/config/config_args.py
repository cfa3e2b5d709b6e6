"""The names of `accelerate.commands.config.config_args` in Accelerate, imported from where accel defines them."""

from accel_core.options.enums import (
    ComputeEnvironment,
    DistributedType,
    SageMakerDistributedType,
)
from accel_launch.settings.config import (
    SAGEMAKER_PYTHON_VERSION,
    SAGEMAKER_PYTORCH_VERSION,
    SAGEMAKER_TRANSFORMERS_VERSION,
    BaseConfig,
    ClusterConfig,
    SageMakerConfig,
    load_config_from_file,
)
from accelerate._commands import (
    cache_dir,
    default_config_file,
    default_json_config_file,
    default_yaml_config_file,
    hf_cache_home,
)
from accelerate._rebinding import write_through

__all__ = [
    "SAGEMAKER_PYTHON_VERSION",
    "SAGEMAKER_PYTORCH_VERSION",
    "SAGEMAKER_TRANSFORMERS_VERSION",
    "BaseConfig",
    "ClusterConfig",
    "ComputeEnvironment",
    "DistributedType",
    "SageMakerConfig",
    "SageMakerDistributedType",
    "cache_dir",
    "default_config_file",
    "default_json_config_file",
    "default_yaml_config_file",
    "hf_cache_home",
    "load_config_from_file",
]

write_through(__name__)
