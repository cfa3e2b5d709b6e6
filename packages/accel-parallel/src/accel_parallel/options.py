"""Options of fully sharded data parallelism."""

from typing import ClassVar

from accel_core._records import record
from accel_core.options.option import Prompt, member_of, names, option

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

    option_prefix: ClassVar[str] = "fsdp_"

    version: int = option(
        1,
        "Version of FSDP: 1 wraps modules, 2 shards them in place.",
        choices=(1, 2),
        launch_parser=str.strip,
        launch_default="1",
        prompt=Prompt("2"),
        field="fsdp_version",
    )
    sharding_strategy: str = option(
        "FULL_SHARD",
        "What version 1 shards.",
        parser=member_of(FSDP_SHARDING_STRATEGY),
        choices=tuple(FSDP_SHARDING_STRATEGY),
        launch_default="FULL_SHARD",
        prompt=Prompt(when=(("fsdp_version", "1"),)),
    )
    reshard_after_forward: bool = option(
        True,
        "Whether version 2 frees gathered parameters between forward and backward.",
        launch_default="true",
        prompt=Prompt(when=(("fsdp_version", "2"),)),
    )
    offload_params: bool = option(
        False,
        "Whether parameters and gradients live in CPU memory.",
        field="cpu_offload",
        launch_default="false",
        prompt=Prompt(),
    )
    auto_wrap_policy: str = option(
        "NO_WRAP",
        "How to choose the modules that are sharded one by one.",
        parser=member_of(FSDP_AUTO_WRAP_POLICY),
        choices=tuple(FSDP_AUTO_WRAP_POLICY),
        prompt=Prompt("TRANSFORMER_BASED_WRAP"),
    )
    transformer_layer_cls_to_wrap: tuple[str, ...] | None = option(
        None,
        "Class names of the blocks to shard one by one, comma-separated.",
        parser=names,
        environment="FSDP_TRANSFORMER_CLS_TO_WRAP",
        field="transformer_cls_names_to_wrap",
        prompt=Prompt(when=(("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),), optional=True),
    )
    min_num_params: int = option(
        0,
        "Smallest number of parameters for which a module is sharded on its own.",
        launch_default=100_000_000,
        prompt=Prompt(when=(("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"),)),
    )
    backward_prefetch: str = option(
        "NO_PREFETCH",
        "When version 1 gathers the next parameters in the backward pass.",
        parser=member_of(FSDP_BACKWARD_PREFETCH),
        choices=tuple(FSDP_BACKWARD_PREFETCH),
        prompt=Prompt("BACKWARD_PRE", when=(("fsdp_version", "1"),)),
    )
    state_dict_type: str | None = option(
        None,
        "Layout of checkpoints; unset means full for version 1 and sharded for version 2.",
        parser=member_of(FSDP_STATE_DICT_TYPE),
        choices=tuple(FSDP_STATE_DICT_TYPE),
        prompt=Prompt("SHARDED_STATE_DICT"),
    )
    forward_prefetch: bool = option(
        False,
        "Whether version 1 gathers the next parameters in the forward pass.",
        launch_default="false",
        prompt=Prompt(when=(("fsdp_version", "1"),)),
    )
    use_orig_params: bool = option(
        False,
        "Read, and not needed: version 1 always keeps the original parameters visible.",
        launch_default="true",
        prompt=Prompt(when=(("fsdp_version", "1"),)),
    )
    cpu_ram_efficient_loading: bool = option(
        False,
        "Whether only one process loads the weights of a pretrained model.",
        launch_default="true",
        prompt=Prompt(),
    )
    sync_module_states: bool = option(
        False,
        "Whether version 1 sends the weights of rank 0 to all ranks.",
        launch_default="true",
        prompt=Prompt(when=(("fsdp_version", "1"),)),
    )
    activation_checkpointing: bool = option(
        False, "Whether activations are recomputed in the backward pass.", launch_default="false", prompt=Prompt()
    )
    ignored_modules: str | None = option(None, "Regular expression for the names of modules to leave unsharded.")
    activation_checkpointing_offload: bool = option(
        False,
        "Whether activation checkpointing keeps its tensors in CPU memory; version 2 only.",
        launch_default="false",
    )
