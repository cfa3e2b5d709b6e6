"""Megatron-LM's arguments under their own names, and megatron-core's configurations made from them."""

from __future__ import annotations

import dataclasses
import logging
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch

from accel_core.errors import ConfigurationError
from accel_megatron import library
from accel_megatron.plugin import MegatronLMPlugin

_logger = logging.getLogger(__name__)

_DEFAULTS: dict[str, Any] = {
    "add_bias_linear": True,
    "bf16": None,
    "data_cache_path": None,
    "data_path": None,
    "decoder_start_token_id": None,
    "eod_token_id": None,
    "eos_token_id": None,
    "fp16": None,
    "lr_warmup_init": 0.0,
    "make_vocab_size_divisible_by": 128,
    "model_return_dict": True,
    "model_type_name": None,
    "num_classes": None,
    "num_experts": None,
    "pad_token_id": None,
    "padded_vocab_size": None,
    "position_embedding_type": None,
    "reset_attention_mask": False,
    "reset_position_ids": False,
    "return_logits": False,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "seed": None,
    "swiglu": False,
    "untie_embeddings_and_output_weights": False,
    "use_rotary_position_embeddings": True,
    "virtual_pipeline_model_parallel_size": None,
}
"""Arguments that the engine reads itself, with their defaults; all others configure megatron-core."""

_INFORMATIVE = frozenset(
    {
        "DDP_impl",
        "adam_beta1",
        "attention_backend",
        "consumed_samples",
        "bert_binary_head",
        "data_parallel_size",
        "decoder_last_pipeline_num_layers",
        "decoder_num_layers",
        "decoder_seq_length",
        "encoder_num_layers",
        "encoder_seq_length",
        "end_weight_decay",
        "eod_mask_loss",
        "eval_interval",
        "eval_iters",
        "global_batch_size",
        "group_query_attention",
        "lr_decay_iters",
        "lr_decay_samples",
        "lr_decay_style",
        "lr_mult",
        "lr_warmup_fraction",
        "lr_warmup_iters",
        "lr_warmup_samples",
        "max_position_embeddings",
        "megatron_dataset_flag",
        "merge_file",
        "micro_batch_size",
        "no_load_optim",
        "no_save_optim",
        "no_wd_decay_cond",
        "norm_epsilon",
        "num_labels",
        "num_layers_per_virtual_pipeline_stage",
        "num_micro_batches",
        "orig_vocab_size",
        "original_model_type",
        "pipeline_model_parallel_split_rank",
        "pretraining_flag",
        "recompute_activations",
        "rope_type",
        "scale_lr_cond",
        "seq_length",
        "splits_string",
        "start_weight_decay",
        "tokenizer_type",
        "train_iters",
        "train_samples",
        "use_custom_fsdp",
        "use_flash_attn",
        "vocab_file",
        "weight_decay_incr_style",
    }
)
"""Arguments that the plugin and its parsers write, and that megatron-core's configurations do not have."""

_RENAMED = {
    "norm_epsilon": "layernorm_epsilon",
    "num_experts": "num_moe_experts",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
"""Arguments that have another name in megatron-core's configurations."""


_REFUSED = {
    "use_custom_fsdp": ("megatron-core's own FSDP is not driven by accel", "Use FullyShardedDataParallelPlugin"),
    "tensorboard_dir": ("megatron-core writes no log", "Use Accelerator(log_with='tensorboard')"),
    "pipeline_model_parallel_split_rank": (
        "megatron-core cannot pipeline an encoder-decoder model",
        "Leave it out",
    ),
}
"""Plugin fields that megatron-core cannot honor, each with the reason and the remedy for the error message."""


@dataclasses.dataclass(frozen=True)
class Degrees:
    """The degree of each kind of parallelism."""

    tensor: int  # tensor-parallel size
    pipeline: int  # number of pipeline stages
    context: int  # context-parallel size
    expert: int  # expert-parallel size
    expert_tensor: int  # tensor-parallel size within an expert


def degrees_of(plugin: MegatronLMPlugin, world_size: int) -> Degrees:
    """Return the degree of each kind of parallelism; refuse those that do not divide the number of processes."""
    found = Degrees(
        plugin.tp_degree or 1,
        plugin.pp_degree or 1,
        plugin.context_parallel_size or 1,
        plugin.expert_model_parallel_size or 1,
        plugin.expert_tensor_parallel_size or 1,
    )
    # Layers of experts divide the ranks of a stage in their own way.
    dense = found.tensor * found.pipeline * found.context
    experts = found.expert * found.expert_tensor * found.pipeline
    if min(dataclasses.astuple(found)) < 1 or world_size % dense or world_size % experts:
        raise ConfigurationError(
            f"Megatron's degrees have to divide the number of processes; got tp_degree={found.tensor}, "
            f"pp_degree={found.pipeline}, context_parallel_size={found.context}, "
            f"expert_model_parallel_size={found.expert}, expert_tensor_parallel_size={found.expert_tensor} for "
            f"{world_size} processes. Change a degree, or the number of processes."
        )
    return found


def refuse_unhonored(plugin: MegatronLMPlugin) -> None:
    """Refuse options that megatron-core does not support, or whose library is not installed."""
    for name, (reason, advice) in _REFUSED.items():
        if (value := plugin.megatron_lm_default_args.get(name)) is not None and value is not False:
            raise ConfigurationError(f"{reason}; got {name}={value!r}. {advice}.")
    if plugin.set_all_logging_options:
        raise ConfigurationError(
            "megatron-core writes no log; got set_all_logging_options=True. Use Accelerator(log_with=...)."
        )
    if (plugin.context_parallel_size or 1) > 1 and not library.has_transformer_engine():
        raise ConfigurationError(
            "Context parallelism in megatron-core needs Transformer Engine, which is not installed; got "
            f"context_parallel_size={plugin.context_parallel_size}. Install it, or set context_parallel_size=1."
        )


def build(
    plugin: MegatronLMPlugin,
    world_size: int,
    *,
    extra_args_provider: Callable[[ArgumentParser], Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> Namespace:
    """Return the arguments of Megatron-LM for a run.

    Raises:
        ConfigurationError: An argument is unknown.
    """
    refuse_unhonored(plugin)
    extra = _extra(extra_args_provider)
    given = {**(args_defaults or {}), **plugin.megatron_lm_default_args, "world_size": world_size}
    # A misspelled argument would be ignored.
    unknown = sorted(set(given) - known() - set(extra) - {"world_size"} - {"num_layers"})
    if unknown:
        raise ConfigurationError(
            f"Megatron-LM arguments have to be known to megatron-core or the engine; got {', '.join(unknown)}. Remove "
            "them from other_megatron_args, or define them in an extra_args_provider."
        )
    found = Namespace(**{**_DEFAULTS, **extra, **given})
    _fill_dependent(found, plugin)
    return found


def _extra(provider: Callable[[ArgumentParser], Any] | None) -> dict[str, Any]:
    """Return the arguments that the user, or Megatron-LM's source tree, defines, with their defaults."""
    parser = ArgumentParser(allow_abbrev=False)
    training = library.training_arguments()  # None unless Megatron-LM's source tree is on the path
    if training is not None:
        parser = training.add_megatron_arguments(parser)
        known_there = dict.fromkeys(vars(parser.parse_args([])))
        parser = ArgumentParser(allow_abbrev=False)
    else:
        known_there = {}
    if provider is not None:
        parser = provider(parser) or parser
    return {**known_there, **vars(parser.parse_args([]))}


def known() -> set[str]:
    """Return the names of the arguments that megatron-core's configurations and the engine read."""
    fields = {field.name for kind in _kinds() for field in dataclasses.fields(kind)}
    return fields | set(_DEFAULTS) | _INFORMATIVE


def _kinds() -> tuple[Any, ...]:
    return (
        library.core("transformer.transformer_config").TransformerConfig,
        library.core("optimizer").OptimizerConfig,
        library.core("distributed").DistributedDataParallelConfig,
    )


def _fill_dependent(found: Namespace, plugin: MegatronLMPlugin) -> None:
    """Fill in the arguments that follow from others."""
    found.recompute_activations = bool(plugin.recompute_activations)
    if found.recompute_activations:
        found.recompute_granularity = "selective"
    if found.recompute_granularity == "selective":  # megatron-core refuses a method with it
        found.recompute_method, found.recompute_num_layers = None, None
    if found.sequence_parallel and (plugin.tp_degree or 1) == 1:
        _logger.warning("sequence_parallelism has no effect with tp_degree=1 and is turned off.")
        found.sequence_parallel = False
    if found.position_embedding_type is None:  # an explicit one wins over the switch
        found.position_embedding_type = "rope" if found.use_rotary_position_embeddings else "learned_absolute"
    stage = found.num_layers_per_virtual_pipeline_stage
    if stage is not None:
        layers = found.num_layers // (plugin.pp_degree or 1)
        if (plugin.pp_degree or 1) < 2 or layers % stage or layers == stage:
            raise ConfigurationError(
                "Virtual stages need at least two pipeline stages, each split into equal parts; got "
                f"num_layers_per_virtual_pipeline_stage={stage} for {found.num_layers} layers on {plugin.pp_degree} "
                "stages. Change one of them."
            )
        found.virtual_pipeline_model_parallel_size = layers // stage
    if found.padded_vocab_size is None:
        multiple = found.make_vocab_size_divisible_by * (plugin.tp_degree or 1)  # each rank needs equally many rows
        found.padded_vocab_size = math.ceil(found.orig_vocab_size / multiple) * multiple


def configured(kind: type[Any], arguments: Namespace, **own: object) -> Any:
    """Create one of megatron-core's configurations from the arguments with matching names."""
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    values = {_RENAMED.get(name, name): value for name, value in vars(arguments).items()}
    taken = {name: value for name, value in values.items() if name in names and value is not None}  # None: its default
    try:
        return kind(**{**taken, **own})
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"megatron-core rejects the configuration; got: {error}. Change MegatronLMPlugin accordingly."
        ) from error


def number_format(arguments: Namespace) -> torch.dtype:
    """Return the dtype of the weights in forward passes."""
    if arguments.fp16:
        return torch.float16
    return torch.bfloat16 if arguments.bf16 else torch.float32
