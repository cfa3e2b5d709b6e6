"""Options of fully sharded data parallelism."""

from accel_core._records import record
from accel_core.options.option import Prompt, boolean, member_of, names, option, word

__all__ = [
    "FSDP2_PYTORCH_VERSION",
    "FSDP2_STATE_DICT_TYPE",
    "FSDP_AUTO_WRAP_POLICY",
    "FSDP_BACKWARD_PREFETCH",
    "FSDP_PYTORCH_VERSION",
    "FSDP_SHARDING_STRATEGY",
    "FSDP_STATE_DICT_TYPE",
    "FsdpOptions",
]

FSDP_SHARDING_STRATEGY = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
FSDP_BACKWARD_PREFETCH = ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
FSDP_STATE_DICT_TYPE = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
FSDP2_STATE_DICT_TYPE = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
FSDP_PYTORCH_VERSION = "2.1.0.a0+32f93b1"
FSDP2_PYTORCH_VERSION = "2.6.0"


@record(frozen=True)
class FsdpOptions:
    """How parameters, gradients and optimizer states are sharded over the ranks."""

    fsdp_version: int = option(
        "FSDP_VERSION",
        int,
        1,
        "Version of FSDP: 1 wraps modules, 2 shards them in place.",
        choices=(1, 2),
        launch_parser=word,
        launch_default="1",
        prompt=Prompt("2"),
    )
    fsdp_sharding_strategy: str = option(
        "FSDP_SHARDING_STRATEGY",
        member_of(FSDP_SHARDING_STRATEGY),
        "FULL_SHARD",
        "What version 1 shards.",
        choices=tuple(FSDP_SHARDING_STRATEGY),
        field="sharding_strategy",
        launch_default="FULL_SHARD",
        prompt=Prompt(when=(("fsdp_version", "1"),)),
    )
    fsdp_reshard_after_forward: bool = option(
        "FSDP_RESHARD_AFTER_FORWARD",
        boolean,
        True,
        "Whether version 2 frees gathered parameters between forward and backward.",
        field="reshard_after_forward",
        launch_default="true",
        prompt=Prompt(when=(("fsdp_version", "2"),)),
    )
    fsdp_offload_params: bool = option(
        "FSDP_OFFLOAD_PARAMS",
        boolean,
        False,
        "Whether parameters and gradients live in CPU memory.",
        field="cpu_offload",
        launch_default="false",
        prompt=Prompt(),
    )
    fsdp_auto_wrap_policy: str = option(
        "FSDP_AUTO_WRAP_POLICY",
        member_of(FSDP_AUTO_WRAP_POLICY),
        "NO_WRAP",
        "How to choose the modules that are sharded one by one.",
        choices=tuple(FSDP_AUTO_WRAP_POLICY),
        field="auto_wrap_policy",
        prompt=Prompt("TRANSFORMER_BASED_WRAP"),
    )
    fsdp_transformer_layer_cls_to_wrap: tuple[str, ...] | None = option(
        "FSDP_TRANSFORMER_CLS_TO_WRAP",
        names,
        None,
        "Class names of the blocks to shard one by one, comma-separated.",
        field="transformer_cls_names_to_wrap",
        prompt=Prompt(when=(("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),), optional=True),
    )
    fsdp_min_num_params: int = option(
        "FSDP_MIN_NUM_PARAMS",
        int,
        0,
        "Smallest number of parameters for which a module is sharded on its own.",
        field="min_num_params",
        launch_default=100_000_000,
        prompt=Prompt(when=(("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"),)),
    )
    fsdp_backward_prefetch: str = option(
        "FSDP_BACKWARD_PREFETCH",
        member_of(FSDP_BACKWARD_PREFETCH),
        "NO_PREFETCH",
        "When version 1 gathers the next parameters in the backward pass.",
        choices=tuple(FSDP_BACKWARD_PREFETCH),
        field="backward_prefetch",
        prompt=Prompt("BACKWARD_PRE", when=(("fsdp_version", "1"),)),
    )
    fsdp_state_dict_type: str | None = option(
        "FSDP_STATE_DICT_TYPE",
        member_of(FSDP_STATE_DICT_TYPE),
        None,
        "Layout of checkpoints; unset means full for version 1 and sharded for version 2.",
        choices=tuple(FSDP_STATE_DICT_TYPE),
        field="state_dict_type",
        prompt=Prompt("SHARDED_STATE_DICT"),
    )
    fsdp_forward_prefetch: bool = option(
        "FSDP_FORWARD_PREFETCH",
        boolean,
        False,
        "Whether version 1 gathers the next parameters in the forward pass.",
        field="forward_prefetch",
        launch_default="false",
        prompt=Prompt(when=(("fsdp_version", "1"),)),
    )
    fsdp_use_orig_params: bool = option(
        "FSDP_USE_ORIG_PARAMS",
        boolean,
        False,
        "Whether version 1 keeps the original parameters visible.",
        field="use_orig_params",
        launch_default="true",
        prompt=Prompt(when=(("fsdp_version", "1"),)),
    )
    fsdp_cpu_ram_efficient_loading: bool = option(
        "FSDP_CPU_RAM_EFFICIENT_LOADING",
        boolean,
        False,
        "Whether only one process loads the weights of a pretrained model.",
        field="cpu_ram_efficient_loading",
        launch_default="true",
        prompt=Prompt(),
    )
    fsdp_sync_module_states: bool = option(
        "FSDP_SYNC_MODULE_STATES",
        boolean,
        False,
        "Whether version 1 sends the weights of rank 0 to all ranks.",
        field="sync_module_states",
        launch_default="true",
        prompt=Prompt(when=(("fsdp_version", "1"),)),
    )
    fsdp_activation_checkpointing: bool = option(
        "FSDP_ACTIVATION_CHECKPOINTING",
        boolean,
        False,
        "Whether activations are recomputed in the backward pass.",
        field="activation_checkpointing",
        launch_default="false",
        prompt=Prompt(),
    )
    fsdp_ignored_modules: str | None = option(
        "FSDP_IGNORED_MODULES",
        str,
        None,
        "Regular expression for the names of modules to leave unsharded.",
        field="ignored_modules",
    )
    fsdp_activation_checkpointing_offload: bool = option(
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
        boolean,
        False,
        "Whether activation checkpointing keeps its tensors in CPU memory; version 2 only.",
        field="activation_checkpointing_offload",
        launch_default="false",
    )
