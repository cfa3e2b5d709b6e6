"""The FSDP plugin reads words, environment and torch's objects, and refuses what a version does not have."""

import functools
import logging

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from accel_core.errors import ConfigurationError, UnsupportedTypeError
from accel_core.plugins.blocks import get_module_class_from_name
from accel_parallel.plugin import FullyShardedDataParallelPlugin


class _Model(nn.Module):
    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(2)


def test_first_version_has_its_own_defaults() -> None:
    """Version 1 shards everything unless either of its fields says otherwise, and writes full state dicts."""
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 1
    assert plugin.sharding_strategy is fsdp.ShardingStrategy.FULL_SHARD
    assert plugin.reshard_after_forward is None
    assert plugin.backward_prefetch is plugin.auto_wrap_policy is plugin.mixed_precision_policy is None
    assert plugin.cpu_offload == fsdp.CPUOffload(offload_params=False)
    assert plugin.state_dict_type is fsdp.StateDictType.FULL_STATE_DICT
    assert isinstance(plugin.state_dict_config, fsdp.FullStateDictConfig)
    assert plugin.state_dict_config.rank0_only
    assert plugin.state_dict_config.offload_to_cpu == torch.accelerator.is_available()
    assert isinstance(plugin.optim_state_dict_config, fsdp.FullOptimStateDictConfig)
    assert plugin.use_orig_params is plugin.sync_module_states is plugin.forward_prefetch is False
    assert plugin.activation_checkpointing is plugin.cpu_ram_efficient_loading is False
    plugin = FullyShardedDataParallelPlugin(reshard_after_forward="SHARD_GRAD_OP")
    assert plugin.sharding_strategy is fsdp.ShardingStrategy.SHARD_GRAD_OP


def test_second_version_has_its_own_defaults() -> None:
    """Version 2 reshards, has none of the first one's flags, and writes shards until another layout is chosen."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    assert plugin.reshard_after_forward is True
    assert plugin.sharding_strategy is plugin.use_orig_params is plugin.sync_module_states is None
    assert type(plugin.cpu_offload) is fsdp.OffloadPolicy
    assert plugin.state_dict_type is fsdp.StateDictType.SHARDED_STATE_DICT
    assert isinstance(plugin.state_dict_config, fsdp.ShardedStateDictConfig)
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert plugin.state_dict_type is fsdp.StateDictType.FULL_STATE_DICT
    assert isinstance(plugin.state_dict_config, fsdp.FullStateDictConfig)
    assert isinstance(plugin.optim_state_dict_config, fsdp.FullOptimStateDictConfig)


@pytest.mark.parametrize(
    ("field", "variable", "text", "value"),
    [
        ("sharding_strategy", "FSDP_SHARDING_STRATEGY", "shard_grad_op", fsdp.ShardingStrategy.SHARD_GRAD_OP),
        ("sharding_strategy", "FSDP_SHARDING_STRATEGY", "2", fsdp.ShardingStrategy.SHARD_GRAD_OP),
        (
            "sharding_strategy",
            "FSDP_SHARDING_STRATEGY",
            "HYBRID_SHARD_ZERO2",
            fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2,
        ),
        ("backward_prefetch", "FSDP_BACKWARD_PREFETCH", "BACKWARD_PRE", fsdp.BackwardPrefetch.BACKWARD_PRE),
        ("backward_prefetch", "FSDP_BACKWARD_PREFETCH", "2", fsdp.BackwardPrefetch.BACKWARD_POST),
        ("backward_prefetch", "FSDP_BACKWARD_PREFETCH", "no_prefetch", None),
        ("state_dict_type", "FSDP_STATE_DICT_TYPE", "3", fsdp.StateDictType.SHARDED_STATE_DICT),
        ("state_dict_type", "FSDP_STATE_DICT_TYPE", "LOCAL_STATE_DICT", fsdp.StateDictType.LOCAL_STATE_DICT),
        ("auto_wrap_policy", "FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP", transformer_auto_wrap_policy),
        ("auto_wrap_policy", "FSDP_AUTO_WRAP_POLICY", "size_based_wrap", size_based_auto_wrap_policy),
        ("cpu_offload", "FSDP_OFFLOAD_PARAMS", "true", fsdp.CPUOffload(offload_params=True)),
        ("use_orig_params", "FSDP_USE_ORIG_PARAMS", "true", True),
        ("sync_module_states", "FSDP_SYNC_MODULE_STATES", "1", True),
        ("forward_prefetch", "FSDP_FORWARD_PREFETCH", "yes", True),
        ("activation_checkpointing", "FSDP_ACTIVATION_CHECKPOINTING", "true", True),
        ("ignored_modules", "FSDP_IGNORED_MODULES", "head.*", "head.*"),
        ("fsdp_version", "FSDP_VERSION", "2", 2),
    ],
)
def test_words_and_environment_say_the_same(
    monkeypatch: pytest.MonkeyPatch, field: str, variable: str, text: str, value: object
) -> None:
    """A field means the same as its environment variable, and torch gets its own object."""
    monkeypatch.setenv(variable, text)
    assert getattr(FullyShardedDataParallelPlugin(), field) == value
    monkeypatch.delenv(variable)
    argument = text if isinstance(value, (str, int)) is False or isinstance(value, str) else value
    if field != "cpu_offload" or argument is not text:
        assert getattr(FullyShardedDataParallelPlugin(**{field: argument}), field) == value


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fsdp_version": 3}, r"fsdp_version is not one of its choices; got 3"),
        ({"sharding_strategy": "QUARTER"}, r"'QUARTER'.*FULL_SHARD"),
        ({"backward_prefetch": "LATE"}, r"'LATE'.*BACKWARD_PRE"),
        ({"state_dict_type": "ZIP"}, r"'ZIP'.*FULL_STATE_DICT"),
        ({"auto_wrap_policy": "ALL"}, r"'ALL'.*SIZE_BASED_WRAP"),
        ({"reshard_after_forward": True}, r"FSDP1.*ShardingStrategy.*True"),
        ({"sharding_strategy": "NO_SHARD", "reshard_after_forward": "FULL_SHARD"}, r"Two strategies"),
        ({"fsdp_version": 2, "reshard_after_forward": fsdp.ShardingStrategy.NO_SHARD}, r"FSDP2.*True or False"),
        ({"fsdp_version": 2, "reshard_after_forward": "FULL_SHARD"}, r"'FULL_SHARD'"),
        ({"fsdp_version": 2, "cpu_offload": fsdp.CPUOffload(True)}, r"FSDP2.*OffloadPolicy"),
        ({"cpu_offload": fsdp.CPUOffloadPolicy()}, r"FSDP1.*CPUOffload"),
        ({"fsdp_version": 2, "state_dict_type": "LOCAL_STATE_DICT"}, r"LOCAL_STATE_DICT.*SHARDED_STATE_DICT"),
        ({"fsdp_version": 2, "forward_prefetch": True}, r"forward_prefetch"),
        ({"activation_checkpointing_offload": True}, r"activation_checkpointing=False"),
        ({"activation_checkpointing": True, "activation_checkpointing_offload": True}, r"fsdp_version=2"),
        ({"mixed_precision_policy": "fp7"}, r"'fp7'.*bf16"),
        ({"min_num_params": "many"}, r"min_num_params cannot be read; got 'many'"),
        ({"fsdp_version": 2, "min_num_params": "many"}, r"min_num_params cannot be read; got 'many'"),
        ({"use_orig_params": "many"}, r"use_orig_params cannot be read; got 'many'"),
        ({"cpu_ram_efficient_loading": "many"}, r"cpu_ram_efficient_loading cannot be read; got 'many'"),
        ({"mixed_precision_policy": {"param_type": "bf16"}}, r"param_type.*buffer_dtype"),
        ({"mixed_precision_policy": fsdp.MixedPrecisionPolicy()}, r"FSDP1.*MixedPrecision"),
        ({"fsdp_version": 2, "mixed_precision_policy": fsdp.MixedPrecision()}, r"FSDP2.*MixedPrecisionPolicy"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: dict[str, object], words: str) -> None:
    """A value that is not known or that the version does not have is refused by name, with what there is."""
    with pytest.raises(ConfigurationError, match=words):
        FullyShardedDataParallelPlugin(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["sharding_strategy", "backward_prefetch", "use_orig_params", "sync_module_states"])
def test_second_version_passes_over_with_a_warning(field: str, caplog: pytest.LogCaptureFixture) -> None:
    """A field of version 1 that version 2 does without is dropped, and said so."""
    value: object = "FULL_SHARD" if field == "sharding_strategy" else True
    value = "BACKWARD_PRE" if field == "backward_prefetch" else value
    with caplog.at_level(logging.WARNING):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **{field: value})  # type: ignore[arg-type]
    assert getattr(plugin, field) is None
    assert field in caplog.text


def test_wrapping_binds_to_the_model() -> None:
    """The policy gets the named classes, which the model must hold, else those it must not split, or a size."""
    model = _Model()
    named = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LayerNorm"]
    )
    named.set_auto_wrap_policy(model)
    assert isinstance(named.auto_wrap_policy, functools.partial)
    assert named.auto_wrap_policy.keywords == {"transformer_layer_cls": {nn.LayerNorm}}
    own = FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")
    own.set_auto_wrap_policy(model)
    assert own.auto_wrap_policy.keywords == {"transformer_layer_cls": {nn.Linear}}  # type: ignore[union-attr]
    sized = FullyShardedDataParallelPlugin(auto_wrap_policy="size_based_wrap", min_num_params=7)
    sized.set_auto_wrap_policy(model)
    assert sized.auto_wrap_policy.keywords == {"min_num_params": 7}  # type: ignore[union-attr]
    assert get_module_class_from_name(nn.Sequential(model), "LayerNorm") is nn.LayerNorm
    missing = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    with pytest.raises(ConfigurationError, match=r"'Block'.*LayerNorm"):
        missing.set_auto_wrap_policy(model)


def test_texts_are_read_as_those_of_the_environment() -> None:
    """A number or a flag may come from a file of texts."""
    plugin = FullyShardedDataParallelPlugin(min_num_params="7", use_orig_params="false", forward_prefetch="yes")  # type: ignore[arg-type]
    assert (plugin.min_num_params, plugin.use_orig_params, plugin.forward_prefetch) == (7, False, True)
    with pytest.raises(UnsupportedTypeError, match="limit_all_gathers is True or False"):
        FullyShardedDataParallelPlugin(limit_all_gathers="no")  # type: ignore[arg-type]


@pytest.mark.parametrize(("version", "third"), [(1, "buffer_dtype"), (2, "output_dtype")])
@pytest.mark.parametrize(
    ("word", "dtype"),
    [("bf16", torch.bfloat16), ("fp8", torch.bfloat16), ("fp16", torch.float16), (torch.float16, torch.float16)],
)
def test_number_formats(version: int, third: str, word: object, dtype: torch.dtype) -> None:
    """A word or dtype sets all formats of the policy, but for buffers where asked; one stays unless overridden."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    plugin.set_mixed_precision(word)
    policy = plugin.mixed_precision_policy
    # torch 2.6 notes a format of reducing that is no other than the parameters' as none of its own.
    assert {policy.param_dtype, policy.reduce_dtype or dtype, getattr(policy, third)} == {dtype}  # type: ignore[union-attr]
    plugin.set_mixed_precision("fp32")
    assert plugin.mixed_precision_policy is policy
    plugin.set_mixed_precision("fp32", override=True)
    assert plugin.mixed_precision_policy.param_dtype is torch.float32  # type: ignore[union-attr]
    if version == 1:
        plugin.set_mixed_precision("bf16", buffer_autocast=True, override=True)
        assert plugin.mixed_precision_policy.buffer_dtype is torch.float32  # type: ignore[union-attr]


def test_a_policy_may_be_a_dict() -> None:
    """A dict of the policy's dtypes, by word or dtype, becomes the policy."""
    plugin = FullyShardedDataParallelPlugin(
        mixed_precision_policy={"param_dtype": "bf16", "reduce_dtype": torch.float32}
    )
    policy = plugin.mixed_precision_policy
    assert isinstance(policy, fsdp.MixedPrecision)
    assert (policy.param_dtype, policy.reduce_dtype, policy.buffer_dtype) == (torch.bfloat16, torch.float32, None)


def test_efficient_loading_reaches_the_library_that_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting it writes the variable that transformers reads, and version 1 then sends weights from rank 0."""
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True)
    assert plugin.sync_module_states
    import os

    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "True"
