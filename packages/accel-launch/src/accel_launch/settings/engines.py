"""The settings of the training engines, made from the option tables that accel-core shares with the training side.

A table says name, environment variable, parser and help; what is added here is what only the command line has: its own
defaults, and the values as text, because that is what the processes get.
"""

from collections.abc import Callable, Iterable
from typing import Any

from accel_core.options.compilation import CompilationOptions
from accel_core.options.deepspeed import DeepSpeedOptions
from accel_core.options.fp8 import Fp8Options
from accel_core.options.fsdp import FsdpOptions
from accel_core.options.megatron import MegatronOptions
from accel_core.options.option import Option, boolean, names, options_of
from accel_core.options.parallelism import ParallelismOptions
from accel_launch.settings.model import Setting

__all__ = ["ENGINES", "FP8_SECTION_WITHOUT_PREFIX"]

FP8_SECTION_WITHOUT_PREFIX = "fp8_"
"""Prefix that flags of the fp8 topic have and keys of a file's `fp8_config` have not, `fp8_format` excepted."""

_DEFAULTS: dict[str, Any] = {
    "fsdp_version": "1",
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_reshard_after_forward": "true",
    "fsdp_offload_params": "false",
    "fsdp_min_num_params": 100000000,
    "fsdp_forward_prefetch": "false",
    "fsdp_use_orig_params": "true",
    "fsdp_cpu_ram_efficient_loading": "true",
    "fsdp_sync_module_states": "true",
    "fsdp_activation_checkpointing": "false",
    "fsdp_activation_checkpointing_offload": "false",
    "parallelism_config_sp_attn_implementation": "sdpa",
    "megatron_lm_tp_degree": 1,
    "megatron_lm_pp_degree": 1,
    "megatron_lm_gradient_clipping": 1.0,
    "fp8_enable_fsdp_float8_all_gather": "true",
    "fp8_pad_inner_dim": "true",
    "fp8_override_linear_precision": (False, False, False),
    "dynamo_mode": "default",
}
_SWITCHES = {
    "dynamo_use_fullgraph",
    "dynamo_use_dynamic",
    "dynamo_use_regional_compilation",
    "fp8_use_autocast_during_eval",
    "fp8_use_mxfp8_block_scaling",
}
_MEGATRON_WITHOUT_A_DEFAULT = {
    "megatron_lm_sequence_parallelism",
    "megatron_lm_recompute_activations",
    "megatron_lm_use_distributed_optimizer",
    "megatron_lm_attention_backend",
    "megatron_lm_attention_softmax_in_fp32",
    "megatron_lm_calculate_per_token_loss",
    "megatron_lm_use_rotary_position_embeddings",
}
_WITHOUT_A_DEFAULT = {
    "parallelism_config_sp_seq_length",
    "megatron_lm_decoder_last_pipeline_num_layers",
    "dynamo_backend",
}
_DYNAMO_MODES = ("default", "reduce-overhead", "max-autotune")


def word(option: Option) -> Callable[[str], str]:
    """Return a parser that checks text against an option and keeps it as text, truth values in lower case.

    Args:
        option: The option of the training side.
    """

    def parse(text: str) -> str:
        value = option.parser(text)
        if isinstance(value, bool):
            return text.strip().lower()
        return value if isinstance(value, str) and option.choices and option.name.startswith("fsdp_") else text.strip()

    return parse


def _as_typed(option: Option) -> Callable[[str], str]:
    def parse(text: str) -> str:
        option.parser(text)
        return text.strip()

    return parse


def _triple(text: str) -> tuple[int, int, int]:
    words = names(text.strip("()[] "))
    if len(words) != 3:
        raise ValueError("three yes-or-no values between commas are needed")
    first, second, third = (int(boolean(part)) for part in words)
    return first, second, third


def _one_or_zero(text: str) -> int:
    return int(boolean(text))


def _parser(option: Option) -> Callable[[str], Any]:
    if option.parser in (int, float) and option.name != "fsdp_version":
        return option.parser
    if option.name.startswith("megatron_lm_") and option.parser is boolean:
        return _as_typed(option) if option.name in _MEGATRON_WITHOUT_A_DEFAULT else boolean
    if option.name in ("fp8_enable_fsdp_float8_all_gather", "fp8_pad_inner_dim"):
        return _one_or_zero
    if option.parser is boolean and option.name == "parallelism_config_sp_seq_length_is_variable":
        return boolean
    if option.name == "gradient_accumulation_steps":
        return int
    if option.name == "gradient_clipping":
        return float
    return word(option)


def _default(option: Option, keep: bool) -> Any:
    if option.name in _DEFAULTS:
        return _DEFAULTS[option.name]
    if option.name in _SWITCHES:
        return False
    if option.name.startswith("megatron_lm_") and option.default is False:
        return None if option.name in _MEGATRON_WITHOUT_A_DEFAULT else False
    if not keep or option.name in _WITHOUT_A_DEFAULT:
        return None
    return option.default


def _rows(
    topic: str,
    engine: str,
    table: type,
    section: str,
    *,
    keep: bool = False,
    prefix: str = "",
    leave_out: Iterable[str] = (),
) -> tuple[Setting, ...]:
    rows = []
    for option in options_of(table):
        if option.name in leave_out:
            continue
        name = option.name if option.name == "fp8_format" else option.name.removeprefix(prefix)
        switch = option.name in _SWITCHES
        rows.append(
            Setting(
                key=option.name,
                topic=topic,
                help=option.help,
                parse=boolean if switch else _parser(option),
                default=_default(option, keep),
                choices=_choices(option),
                kind="switch" if switch else "value",
                path=(section, name),
                environment=option.environment,
                engine=engine,
            )
        )
    return tuple(rows)


def _choices(option: Option) -> tuple[Any, ...]:
    if option.name == "dynamo_backend":
        return tuple(choice.lower() for choice in option.choices)
    if option.name == "dynamo_mode":
        return _DYNAMO_MODES
    if option.name == "fp8_backend":
        return tuple(choice.lower() for choice in option.choices)
    if option.name == "zero_stage":
        return option.choices
    return tuple(str(choice) for choice in option.choices)


_MULTINODE = ("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm")


def _deepspeed_launcher(key: str, help: str, choices: tuple[str, ...] = ()) -> Setting:
    return Setting(
        key, "DeepSpeed", help, choices=choices, path=("deepspeed_config", key), environment=f"ACCEL_{key.upper()}"
    )


ENGINES: tuple[Setting, ...] = (
    *_rows("Compilation", "dynamo", CompilationOptions, "dynamo_config", keep=True),
    *_rows("DeepSpeed", "deepspeed", DeepSpeedOptions, "deepspeed_config"),
    _deepspeed_launcher("deepspeed_hostfile", "Hosts and their slots for a run over several machines."),
    _deepspeed_launcher("deepspeed_exclusion_filter", "Hosts and slots to leave out."),
    _deepspeed_launcher("deepspeed_inclusion_filter", "Hosts and slots to use, and no others."),
    _deepspeed_launcher("deepspeed_multinode_launcher", "How DeepSpeed reaches the other machines.", _MULTINODE),
    *_rows("FSDP", "fsdp", FsdpOptions, "fsdp_config"),
    *_rows("Megatron-LM", "megatron", MegatronOptions, "megatron_lm_config"),
    *_rows("Mesh of several axes", "parallelism", ParallelismOptions, "parallelism_config", keep=True),
    *_rows(
        "FP8",
        "fp8",
        Fp8Options,
        "fp8_config",
        keep=True,
        prefix=FP8_SECTION_WITHOUT_PREFIX,
        leave_out=("fp8_override_fprop", "fp8_override_dgrad", "fp8_override_wgrad"),
    ),
    Setting(
        "fp8_override_linear_precision",
        "FP8",
        "Whether forward, input-gradient and weight-gradient products stay wide.",
        _triple,
        (False, False, False),
        path=("fp8_config", "override_linear_precision"),
        environment="ACCEL_FP8_OVERRIDE_LINEAR_PRECISION",
    ),
)
"""Settings of the engines, in the order of the help."""
