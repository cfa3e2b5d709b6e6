"""The closed sets of values that options, plugins and state are made of.

Member names, values and the textual form of each member are public: configuration files, pickles and
`str(PartialState().distributed_type)` hold them.
"""

import difflib
import enum
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from accel_core.errors import ConfigurationError


def meant(word: object, known: Iterable[str], others: Mapping[str, str] | None = None) -> str:
    """Return a question for the word that somebody may have meant, or nothing; `others` are other words for some."""
    near = difflib.get_close_matches(str(word).lower(), [*known, *(others or ())], n=1)
    return f" Did you mean {(others or {}).get(near[0], near[0])!r}?" if near else ""


class EnumWithContains(enum.EnumMeta):
    """Metaclass that lets `in` accept a member's value as well as a member, on every Python version."""

    def __contains__(cls, item: object) -> bool:
        """Return whether `item` is a member of the enumeration or the value of one."""
        try:
            cls(item)
        except ValueError:
            return False
        return True


class BaseEnum(enum.Enum, metaclass=EnumWithContains):
    """Enumeration whose members print as their value and that can list those values."""

    def __str__(self) -> str:
        """Return the value of the member."""
        return str(self.value)

    @classmethod
    def list(cls) -> list[Any]:
        """Return the values of all members, in the order of their definition."""
        return [member.value for member in cls]


class DistributedType(str, enum.Enum):
    """Label of how a run is spread: derived from device and strategy, for users to read."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"


class SageMakerDistributedType(str, enum.Enum):
    """How a job on Amazon SageMaker is spread."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class ComputeEnvironment(str, enum.Enum):
    """Where a launched run takes place."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class FP8BackendType(str, enum.Enum):
    """Library that computes in 8-bit floating point: Transformer Engine, MS-AMP or torchao."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class DDPCommunicationHookType(BaseEnum):
    """How `DistributedDataParallel` compresses gradients on the wire.

    See `torch.distributed.algorithms.ddp_comm_hooks`.
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class DynamoBackend(str, BaseEnum):
    """Compiler behind `torch.compile`; the lower-case value is the name torch knows it by."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class LoggerType(BaseEnum):
    """Experiment tracker, or `ALL` for each one installed."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class PrecisionType(str, BaseEnum):
    """Number format in which the forward pass computes."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class PrecisionRow(NamedTuple):
    """What programs have to know of a precision: the launcher, engines, and commands that run a script.

    Attributes:
        dtype: torch's name of what operations under autocast compute in; nothing where there is no autocast.
        compared_as: Whose rounding tells how far two runs may differ; nothing for that of the weights.
        exchanges_layers: Whether a library puts its own layers in a model: engines that bring their own refuse it.
    """

    dtype: str = ""
    compared_as: str = ""
    exchanges_layers: bool = False


# In the order in which commands offer them; what computes in one is chosen in `precision/registry.py`.
PRECISIONS = {
    "no": PrecisionRow(),
    "fp16": PrecisionRow("float16", "float16"),
    "bf16": PrecisionRow("bfloat16", "bfloat16"),
    "fp8": PrecisionRow("bfloat16", "fp8", exchanges_layers=True),
}
OTHER_NAMES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "no", "fp32": "no", "none": "no"}
AUTOCAST_PRECISIONS = tuple(name for name, row in PRECISIONS.items() if not row.exchanges_layers)


class RNGType(BaseEnum):
    """Random number generator whose state can be made equal on all ranks."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ConfigurationError(
            f"No generator is called {value!r}. Use one of {', '.join(cls.list())} in rng_types; set_seed() seeds "
            "those of Python and numpy."
        )


class CustomDtype(enum.Enum):
    """Number formats that torch has no dtype for but that a device map has to size."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


DEEPSPEED_MULTINODE_LAUNCHERS = ["pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"]
