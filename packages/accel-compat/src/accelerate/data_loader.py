"""The names of `accelerate.data_loader` in Accelerate, imported from where accel defines them."""

from accel_core.comm.batch import concatenate as concatenate
from accel_core.comm.batch import find_batch_size as find_batch_size
from accel_core.comm.batch import send_to_device as send_to_device
from accel_core.comm.batch import slice_tensors as slice_tensors
from accel_core.comm.collectives import broadcast as broadcast
from accel_core.comm.objects import broadcast_object_list as broadcast_object_list
from accel_core.data.adapter import DataLoaderAdapter as DataLoaderAdapter
from accel_core.data.dispatcher import DataLoaderDispatcher as DataLoaderDispatcher
from accel_core.data.loader import DataLoaderShard as DataLoaderShard
from accel_core.data.loader import DataLoaderStateMixin as DataLoaderStateMixin
from accel_core.data.prepare import prepare_data_loader as prepare_data_loader
from accel_core.data.samplers import BatchSamplerShard as BatchSamplerShard
from accel_core.data.samplers import IterableDatasetShard as IterableDatasetShard
from accel_core.data.samplers import SeedableRandomSampler as SeedableRandomSampler
from accel_core.data.samplers import get_sampler as get_sampler
from accel_core.data.skip import SkipBatchSampler as SkipBatchSampler
from accel_core.data.skip import SkipDataLoader as SkipDataLoader
from accel_core.data.skip import skip_first_batches as skip_first_batches
from accel_core.host.versions import compare_versions as compare_versions
from accel_core.host.versions import is_torch_version as is_torch_version
from accel_core.logging import get_logger as get_logger
from accel_core.options.enums import DistributedType as DistributedType
from accel_core.options.enums import RNGType as RNGType
from accel_core.random import synchronize_rng_states as synchronize_rng_states
from accel_core.state.gradient import GradientState as GradientState
from accel_core.state.process import PartialState as PartialState
from accelerate import _rebinding
from accelerate._availability import is_datasets_available as is_datasets_available
from accelerate._availability import is_torch_xla_available as is_torch_xla_available
from accelerate._availability import (
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
)
from accelerate._operations import get_data_structure as get_data_structure
from accelerate._operations import initialize_tensors as initialize_tensors

additional_kwargs = {"in_order": True}
"""Settings of torch's loader, with their defaults, that came with torch 2.6."""

v = "2.6.0"
"""The version of torch that brought `additional_kwargs`."""

_rebinding.write_through(__name__)
