"""The names of `accelerate.commands.config.config_args` in Accelerate, imported from where accel defines them."""

from accel_core.options.enums import ComputeEnvironment as ComputeEnvironment
from accel_core.options.enums import DistributedType as DistributedType
from accel_core.options.enums import SageMakerDistributedType as SageMakerDistributedType
from accel_launch.settings.config import SAGEMAKER_PYTHON_VERSION as SAGEMAKER_PYTHON_VERSION
from accel_launch.settings.config import SAGEMAKER_PYTORCH_VERSION as SAGEMAKER_PYTORCH_VERSION
from accel_launch.settings.config import SAGEMAKER_TRANSFORMERS_VERSION as SAGEMAKER_TRANSFORMERS_VERSION
from accel_launch.settings.config import BaseConfig as BaseConfig
from accel_launch.settings.config import ClusterConfig as ClusterConfig
from accel_launch.settings.config import SageMakerConfig as SageMakerConfig
from accel_launch.settings.config import load_config_from_file as load_config_from_file
from accelerate import _rebinding
from accelerate._commands import cache_dir as cache_dir
from accelerate._commands import default_config_file as default_config_file
from accelerate._commands import default_json_config_file as default_json_config_file
from accelerate._commands import default_yaml_config_file as default_yaml_config_file
from accelerate._commands import hf_cache_home as hf_cache_home

_rebinding.write_through(__name__)
