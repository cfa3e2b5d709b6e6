"""The names of `accelerate.utils.offload` in Accelerate, imported from where accel defines them."""

from accel_bigmodel.offload.store import OffloadedWeightsLoader as OffloadedWeightsLoader
from accel_bigmodel.offload.store import PrefixedDataset as PrefixedDataset
from accel_bigmodel.offload.store import extract_submodules_state_dict as extract_submodules_state_dict
from accel_bigmodel.offload.store import load_offloaded_weight as load_offloaded_weight
from accel_bigmodel.offload.store import offload_state_dict as offload_state_dict
from accel_bigmodel.offload.store import offload_weight as offload_weight
from accel_bigmodel.offload.store import save_offload_index as save_offload_index
from accelerate import _rebinding

_rebinding.write_through(__name__)
