"""The names of `accelerate.state` in Accelerate, imported from where accel defines them."""

from accel_core.host.affinity import set_numa_affinity as set_numa_affinity
from accel_core.host.availability import is_deepspeed_available as is_deepspeed_available
from accel_core.host.availability import is_hpu_available as is_hpu_available
from accel_core.options.enums import DistributedType as DistributedType
from accel_core.options.enums import DynamoBackend as DynamoBackend
from accel_core.options.enums import SageMakerDistributedType as SageMakerDistributedType
from accel_core.plugins.accumulation import GradientAccumulationPlugin as GradientAccumulationPlugin
from accel_core.state.gradient import GradientState as GradientState
from accel_core.state.process import PartialState as PartialState
from accel_core.state.process import do_nothing as do_nothing
from accel_core.state.run import AcceleratorState as AcceleratorState
from accel_core.state.run import is_initialized as is_initialized
from accelerate import _rebinding
from accelerate._availability import deepspeed_required as deepspeed_required
from accelerate._availability import is_datasets_available as is_datasets_available
from accelerate._availability import is_fp8_available as is_fp8_available
from accelerate._availability import is_habana_gaudi1 as is_habana_gaudi1
from accelerate._availability import is_mlu_available as is_mlu_available
from accelerate._availability import is_mps_available as is_mps_available
from accelerate._availability import is_musa_available as is_musa_available
from accelerate._availability import is_neuron_available as is_neuron_available
from accelerate._availability import is_npu_available as is_npu_available
from accelerate._availability import is_sdaa_available as is_sdaa_available
from accelerate._availability import is_torch_xla_available as is_torch_xla_available
from accelerate._availability import is_xccl_available as is_xccl_available
from accelerate._availability import is_xpu_available as is_xpu_available
from accelerate._environment import get_int_from_env as get_int_from_env
from accelerate._environment import parse_choice_from_env as parse_choice_from_env
from accelerate._environment import parse_flag_from_env as parse_flag_from_env
from accelerate._machine import check_cuda_fp8_capability as check_cuda_fp8_capability
from accelerate._machine import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
from accelerate._machine import get_cpu_distributed_information as get_cpu_distributed_information
from accelerate._states import ThreadLocalSharedDict as ThreadLocalSharedDict

_rebinding.write_through(__name__)
