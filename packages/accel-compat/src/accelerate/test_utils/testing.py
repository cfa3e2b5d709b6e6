"""The names of `accelerate.test_utils.testing` in Accelerate, imported from where they are defined."""

from accel_core.comm.collectives import gather as gather
from accel_core.host.environ import str_to_bool as str_to_bool
from accel_core.host.versions import compare_versions as compare_versions
from accel_core.host.versions import is_torch_version as is_torch_version
from accel_core.state.gradient import GradientState as GradientState
from accel_core.state.run import AcceleratorState as AcceleratorState
from accelerate import _rebinding
from accelerate._environment import parse_flag_from_env as parse_flag_from_env
from accelerate._test_backend import device_count as device_count
from accelerate._test_backend import get_backend as get_backend
from accelerate._test_backend import memory_allocated_func as memory_allocated_func
from accelerate._test_backend import torch_device as torch_device
from accelerate._test_cases import AccelerateTestCase as AccelerateTestCase
from accelerate._test_cases import MockingTestCase as MockingTestCase
from accelerate._test_cases import TempDirTestCase as TempDirTestCase
from accelerate._test_markers import *
from accelerate._test_processes import DEFAULT_LAUNCH_COMMAND as DEFAULT_LAUNCH_COMMAND
from accelerate._test_processes import SubprocessCallException as SubprocessCallException
from accelerate._test_processes import are_the_same_tensors as are_the_same_tensors
from accelerate._test_processes import assert_exception as assert_exception
from accelerate._test_processes import capture_call_output as capture_call_output
from accelerate._test_processes import execute_subprocess_async as execute_subprocess_async
from accelerate._test_processes import get_launch_command as get_launch_command
from accelerate._test_processes import get_torch_dist_unique_port as get_torch_dist_unique_port
from accelerate._test_processes import path_in_accelerate_package as path_in_accelerate_package
from accelerate._test_processes import pytest_xdist_worker_id as pytest_xdist_worker_id
from accelerate._test_processes import run_command as run_command

_rebinding.write_through(__name__)
