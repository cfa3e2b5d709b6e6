"""Options of the device mesh."""

from typing import ClassVar

from accel_core._records import record
from accel_core.options.option import Prompt, boolean, option

CP_STRATEGIES = ("allgather", "alltoall")


@record(frozen=True)
class ParallelismOptions:
    """Number of ranks along each axis of the mesh."""

    option_prefix: ClassVar[str] = "parallelism_config_"

    dp_replicate_size: int = option(1, "Number of copies of the model.", prompt=Prompt())
    dp_shard_size: int = option(1, "Number of ranks that shard each copy of the model.", prompt=Prompt())
    ep_size: int = option(
        1, "Number of ranks that share out the experts of a mixture; they read different data.", prompt=Prompt()
    )
    pp_size: int = option(
        1,
        "Number of ranks that each hold some blocks of the model, through which batches pass in parts.",
        prompt=Prompt(),
    )
    tp_size: int = option(1, "Number of ranks that share each matrix product.", prompt=Prompt())
    cp_size: int = option(1, "Number of ranks that share each sequence by context parallelism.", prompt=Prompt())
    cp_backend: str = option("torch", "Library for context parallelism.", choices=("torch",))
    cp_comm_strategy: str = option(
        "allgather",
        "How ranks exchange keys and values: gathered at once, or passed around a ring.",
        choices=CP_STRATEGIES,
        only_with="parallelism_config_cp_size",
    )
    sp_size: int = option(1, "Number of ranks that share each sequence by Ulysses sequence parallelism.")
    sp_backend: str = option("deepspeed", "Library for sequence parallelism.", choices=("deepspeed",))
    sp_seq_length: int | None = option(
        None, "Length of all sequences in tokens, if it is fixed.", parser=int, only_with="parallelism_config_sp_size"
    )
    sp_seq_length_is_variable: bool = option(
        True,
        "Whether sequences differ in length from batch to batch.",
        launch_parser=boolean,
        only_with="parallelism_config_sp_size",
    )
    sp_attn_implementation: str | None = option(
        None,
        "Attention implementation that each rank uses for its heads.",
        launch_default="sdpa",
        only_with="parallelism_config_sp_size",
    )
