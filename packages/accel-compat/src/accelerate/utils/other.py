"""The names of `accelerate.utils.other` in Accelerate, imported from where accel defines them."""

from codecs import encode

from accel_core.checkpoint.pickles import TORCH_SAFE_GLOBALS
from accel_core.checkpoint.plain import (
    load,
    save,
)
from accel_core.comm.collectives import (
    reduce,
)
from accel_core.host.availability import (
    is_deepspeed_available,
)
from accel_core.host.ports import (
    get_free_port,
)
from accel_core.host.versions import (
    is_torch_version,
)
from accel_core.logging import (
    get_logger,
)
from accel_core.modules.compilation import (
    compile_regions,
    has_compiled_regions,
    is_compiled_module,
    is_repeated_blocks,
)
from accel_core.modules.sizes import (
    convert_bytes,
    id_tensor_storage,
)
from accel_core.modules.traversal import (
    has_repeated_blocks,
)
from accel_core.modules.unwrap import (
    extract_model_from_parallel,
)
from accel_core.options.enums import (
    DistributedType,
)
from accel_core.options.fsdp import (
    FSDP_PYTORCH_VERSION,
)
from accel_core.precision.fp8.transformer_engine import (
    convert_model,
)
from accel_core.state.process import (
    PartialState,
    wait_for_everyone,
)
from accel_launch.settings.config import (
    write_basic_config,
)
from accelerate._availability import (
    is_numpy_available,
    is_torch_distributed_available,
    is_torch_xla_available,
    is_weights_only_available,
)
from accelerate._engines import (
    compile_regions_deepspeed,
    compile_regions_fsdp2,
)
from accelerate._kernel import (
    check_os_kernel,
)
from accelerate._machine import (
    is_port_in_use,
)
from accelerate._merging import (
    merge_dicts,
)
from accelerate._models import (
    clean_state_dict_for_safetensors,
    get_module_children_bottom_up,
)
from accelerate._names import (
    get_pretty_name,
    recursive_getattr,
)
from accelerate._rebinding import write_through
from accelerate._sharded_models import (
    get_model_tp_size,
    model_has_dtensor,
)

__all__ = [
    "FSDP_PYTORCH_VERSION",
    "TORCH_SAFE_GLOBALS",
    "DistributedType",
    "PartialState",
    "check_os_kernel",
    "clean_state_dict_for_safetensors",
    "compile_regions",
    "compile_regions_deepspeed",
    "compile_regions_fsdp2",
    "convert_bytes",
    "convert_model",
    "encode",
    "extract_model_from_parallel",
    "get_free_port",
    "get_logger",
    "get_model_tp_size",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "has_compiled_regions",
    "has_repeated_blocks",
    "id_tensor_storage",
    "is_compiled_module",
    "is_deepspeed_available",
    "is_numpy_available",
    "is_port_in_use",
    "is_repeated_blocks",
    "is_torch_distributed_available",
    "is_torch_version",
    "is_torch_xla_available",
    "is_weights_only_available",
    "load",
    "merge_dicts",
    "model_has_dtensor",
    "recursive_getattr",
    "reduce",
    "save",
    "wait_for_everyone",
    "write_basic_config",
]

write_through(__name__)
