"""The names of `accelerate.inference` in Accelerate, imported from where accel defines them."""

from accel_bigmodel.device_map.infer import infer_auto_device_map as infer_auto_device_map
from accel_bigmodel.pipeline import build_pipeline as build_pipeline
from accel_bigmodel.pipeline import find_pippy_batch_size as find_pippy_batch_size
from accel_bigmodel.pipeline import generate_device_map as generate_device_map
from accel_bigmodel.pipeline import pippy_forward as pippy_forward
from accel_bigmodel.pipeline import prepare_pippy as prepare_pippy
from accel_bigmodel.sizes import calculate_maximum_sizes as calculate_maximum_sizes
from accel_core.comm.batch import pad_input_tensors as pad_input_tensors
from accel_core.comm.batch import send_to_device as send_to_device
from accel_core.state.process import PartialState as PartialState
from accelerate import _rebinding
from accelerate._availability import is_pippy_available as is_pippy_available
from accelerate._machine import convert_bytes as convert_bytes
from accelerate._operations import copy_tensor_to_devices as copy_tensor_to_devices
from accelerate._operations import ignorant_find_batch_size as ignorant_find_batch_size

_rebinding.write_through(__name__)
