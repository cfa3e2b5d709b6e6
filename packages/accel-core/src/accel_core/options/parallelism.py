"""Options of the device mesh."""

from accel_core._records import record
from accel_core.options.option import Prompt, boolean, option

__all__ = [
    "BETA_CP_AVAILABLE_PYTORCH_VERSION",
    "BETA_SP_AVAILABLE_DEEPSPEED_VERSION",
    "BETA_TP_AVAILABLE_PYTORCH_VERSION",
    "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION",
    "CP_STRATEGIES",
    "DTENSOR_PYTORCH_VERSION",
    "ParallelismOptions",
]

BETA_CP_AVAILABLE_PYTORCH_VERSION = "2.6.0"
BETA_SP_AVAILABLE_DEEPSPEED_VERSION = "0.18.2"
BETA_TP_AVAILABLE_PYTORCH_VERSION = "2.3.0"
BETA_TP_AVAILABLE_TRANSFORMERS_VERSION = "4.52.0"
DTENSOR_PYTORCH_VERSION = "2.5.0"

CP_STRATEGIES = ("allgather", "alltoall")


@record(frozen=True)
class ParallelismOptions:
    """Number of ranks along each axis of the mesh."""

    parallelism_config_dp_replicate_size: int = option(
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
        int,
        1,
        "Number of copies of the model.",
        field="dp_replicate_size",
        prompt=Prompt(),
    )
    parallelism_config_dp_shard_size: int = option(
        "PARALLELISM_CONFIG_DP_SHARD_SIZE",
        int,
        1,
        "Number of ranks that shard each copy of the model.",
        field="dp_shard_size",
        prompt=Prompt(),
    )
    parallelism_config_ep_size: int = option(
        "PARALLELISM_CONFIG_EP_SIZE",
        int,
        1,
        "Number of ranks that share out the experts of a mixture; they read different data.",
        field="ep_size",
        prompt=Prompt(),
    )
    parallelism_config_pp_size: int = option(
        "PARALLELISM_CONFIG_PP_SIZE",
        int,
        1,
        "Number of ranks that each hold some blocks of the model, through which batches pass in parts.",
        field="pp_size",
        prompt=Prompt(),
    )
    parallelism_config_tp_size: int = option(
        "PARALLELISM_CONFIG_TP_SIZE",
        int,
        1,
        "Number of ranks that share each matrix product.",
        field="tp_size",
        prompt=Prompt(),
    )
    parallelism_config_cp_size: int = option(
        "PARALLELISM_CONFIG_CP_SIZE",
        int,
        1,
        "Number of ranks that share each sequence by context parallelism.",
        field="cp_size",
        prompt=Prompt(),
    )
    parallelism_config_cp_backend: str = option(
        "PARALLELISM_CONFIG_CP_BACKEND",
        str,
        "torch",
        "Library for context parallelism.",
        choices=("torch",),
        field="cp_backend",
    )
    parallelism_config_cp_comm_strategy: str = option(
        "PARALLELISM_CONFIG_CP_COMM_STRATEGY",
        str,
        "allgather",
        "How ranks exchange keys and values: gathered at once, or passed around a ring.",
        choices=CP_STRATEGIES,
        field="cp_comm_strategy",
        only_with="parallelism_config_cp_size",
    )
    parallelism_config_sp_size: int = option(
        "PARALLELISM_CONFIG_SP_SIZE",
        int,
        1,
        "Number of ranks that share each sequence by Ulysses sequence parallelism.",
        field="sp_size",
    )
    parallelism_config_sp_backend: str = option(
        "PARALLELISM_CONFIG_SP_BACKEND",
        str,
        "deepspeed",
        "Library for sequence parallelism.",
        choices=("deepspeed",),
        field="sp_backend",
    )
    parallelism_config_sp_seq_length: int | None = option(
        "PARALLELISM_CONFIG_SP_SEQ_LENGTH",
        int,
        None,
        "Length of all sequences in tokens, if it is fixed.",
        field="sp_seq_length",
        only_with="parallelism_config_sp_size",
    )
    parallelism_config_sp_seq_length_is_variable: bool = option(
        "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE",
        boolean,
        True,
        "Whether sequences differ in length from batch to batch.",
        field="sp_seq_length_is_variable",
        launch_parser=boolean,
        only_with="parallelism_config_sp_size",
    )
    parallelism_config_sp_attn_implementation: str | None = option(
        "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION",
        str,
        None,
        "Attention implementation that each rank uses for its heads.",
        field="sp_attn_implementation",
        launch_default="sdpa",
        only_with="parallelism_config_sp_size",
    )
