"""Each flag of FSDP reaches the field of the plugin that its row names."""

from typing import Any

import pytest
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from accel_core.options.option import options_of
from accel_parallel.options import FsdpOptions
from accel_parallel.plugin import FullyShardedDataParallelPlugin

pytest.importorskip("accel_launch", reason="what the launcher does with these settings")
from accel_launch.commands.launch import launch_command_parser
from accel_launch.commands.start import settings_from
from accel_launch.settings.child import child_environment

OTHERS: dict[str, list[str]] = {
    "transformer_cls_names_to_wrap": ["--fsdp-auto-wrap-policy", "TRANSFORMER_BASED_WRAP"],
    "min_num_params": ["--fsdp-auto-wrap-policy", "SIZE_BASED_WRAP"],
    "reshard_after_forward": ["--fsdp-version", "2"],
    "activation_checkpointing_offload": ["--fsdp-version", "2", "--fsdp-activation-checkpointing", "true"],
}
"""What a field is read beside."""

VALUES: dict[str, tuple[str, Any]] = {
    "fsdp_version": ("2", 2),
    "sharding_strategy": ("HYBRID_SHARD", fsdp.ShardingStrategy.HYBRID_SHARD),
    "reshard_after_forward": ("false", False),
    "cpu_offload": ("true", fsdp.CPUOffload(offload_params=True)),
    "auto_wrap_policy": ("SIZE_BASED_WRAP", size_based_auto_wrap_policy),
    "transformer_cls_names_to_wrap": ("Block,Other", ["Block", "Other"]),
    "min_num_params": ("17", 17),
    "backward_prefetch": ("BACKWARD_POST", fsdp.BackwardPrefetch.BACKWARD_POST),
    "state_dict_type": ("LOCAL_STATE_DICT", fsdp.StateDictType.LOCAL_STATE_DICT),
    "forward_prefetch": ("true", True),
    "use_orig_params": ("false", False),
    "cpu_ram_efficient_loading": ("false", False),
    "sync_module_states": ("false", False),
    "activation_checkpointing": ("true", True),
    "ignored_modules": ("head.*", "head.*"),
    "activation_checkpointing_offload": ("true", True),
}
"""A text that is not what the launcher says where nobody does, and what it means."""


@pytest.mark.parametrize("option", options_of(FsdpOptions), ids=lambda option: option.field)
def test_a_flag_sets_its_field(option: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag writes the variable, and the variable makes the field of a plugin without arguments."""
    text, value = VALUES[option.field]
    words = ["--cpu", "--use-fsdp", *OTHERS.get(option.field, [])]
    if option.field in ("cpu_ram_efficient_loading", "sync_module_states"):
        words += ["--fsdp-cpu-ram-efficient-loading", "false"]
    flag = next(name for name in _flags() if name.removeprefix("--").replace("-", "_") == option.name)
    found = {}
    for extra in ([], [flag, text]):
        with monkeypatch.context() as patched:
            settings = settings_from(launch_command_parser().parse_args([*words, *extra, "s.py"]))
            for name, said in child_environment(settings).items():
                patched.setenv(name, said)
            found[bool(extra)] = getattr(FullyShardedDataParallelPlugin(), option.field)
    assert found[True] == value
    assert found[False] != value or option.field in ("cpu_ram_efficient_loading", "sync_module_states")


def _flags() -> list[str]:
    return [flag for action in launch_command_parser()._actions for flag in action.option_strings]
