"""The names of `accelerate.data_loader` in Accelerate, imported from where accel defines them."""

from accel_core.comm.batch import (
    concatenate,
    find_batch_size,
    send_to_device,
    slice_tensors,
)
from accel_core.comm.collectives import (
    broadcast,
)
from accel_core.comm.objects import (
    broadcast_object_list,
)
from accel_core.data.adapter import (
    DataLoaderAdapter,
)
from accel_core.data.dispatcher import (
    DataLoaderDispatcher,
)
from accel_core.data.loader import (
    DataLoaderShard,
    DataLoaderStateMixin,
)
from accel_core.data.prepare import (
    prepare_data_loader,
)
from accel_core.data.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    get_sampler,
)
from accel_core.data.skip import (
    SkipBatchSampler,
    SkipDataLoader,
    skip_first_batches,
)
from accel_core.host.versions import (
    compare_versions,
    is_torch_version,
)
from accel_core.logging import (
    get_logger,
)
from accel_core.options.enums import (
    DistributedType,
    RNGType,
)
from accel_core.random import (
    synchronize_rng_states,
)
from accel_core.state.gradient import (
    GradientState,
)
from accel_core.state.process import (
    PartialState,
)
from accelerate._availability import (
    is_datasets_available,
    is_torch_xla_available,
    is_torchdata_stateful_dataloader_available,
)
from accelerate._operations import (
    get_data_structure,
    initialize_tensors,
)
from accelerate._rebinding import write_through

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "DistributedType",
    "GradientState",
    "IterableDatasetShard",
    "PartialState",
    "RNGType",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "additional_kwargs",
    "broadcast",
    "broadcast_object_list",
    "compare_versions",
    "concatenate",
    "find_batch_size",
    "get_data_structure",
    "get_logger",
    "get_sampler",
    "initialize_tensors",
    "is_datasets_available",
    "is_torch_version",
    "is_torch_xla_available",
    "is_torchdata_stateful_dataloader_available",
    "prepare_data_loader",
    "send_to_device",
    "skip_first_batches",
    "slice_tensors",
    "synchronize_rng_states",
    "v",
]

additional_kwargs = {"in_order": True}
"""Settings of torch's loader, with their defaults, that came with torch 2.6."""

v = "2.6.0"
"""The version of torch that brought `additional_kwargs`."""

write_through(__name__)
