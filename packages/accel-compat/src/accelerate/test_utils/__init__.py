"""The names of `accelerate.test_utils` in Accelerate that test suites import, from where they are defined."""

from accelerate import _rebinding
from accelerate._regression import RegressionDataset as RegressionDataset
from accelerate._regression import RegressionModel as RegressionModel
from accelerate._test_backend import device_count as device_count
from accelerate._test_backend import memory_allocated_func as memory_allocated_func
from accelerate._test_backend import torch_device as torch_device
from accelerate._test_markers import *
from accelerate._test_processes import DEFAULT_LAUNCH_COMMAND as DEFAULT_LAUNCH_COMMAND
from accelerate._test_processes import are_the_same_tensors as are_the_same_tensors
from accelerate._test_processes import assert_exception as assert_exception
from accelerate._test_processes import capture_call_output as capture_call_output
from accelerate._test_processes import execute_subprocess_async as execute_subprocess_async
from accelerate._test_processes import get_launch_command as get_launch_command
from accelerate._test_processes import get_torch_dist_unique_port as get_torch_dist_unique_port
from accelerate._test_processes import path_in_accelerate_package as path_in_accelerate_package
from accelerate._test_processes import pytest_xdist_worker_id as pytest_xdist_worker_id
from accelerate.test_utils import scripts as scripts
from accelerate.test_utils import testing as testing
from accelerate.test_utils import training as training
from accelerate.test_utils.scripts import test_script as test_script

_rebinding.write_through(__name__)
