"""What Megatron-LM has to know about the models of transformers: one parser for each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

Parser = Callable[[Any, Any, "Mapping[str, Any] | None"], None]
P = TypeVar("P", bound=Parser)

MODEL_CONFIGS_TO_MEGATRON_PARSERS: dict[str, Parser] = {}


class _Plugin(Protocol):
    """What a parser reads of a `MegatronLMPlugin`, and where it writes."""

    seq_length: int | None
    encoder_seq_length: int | None
    decoder_seq_length: int | None
    return_logits: bool
    megatron_lm_default_args: dict[str, Any]


class _Model(Protocol):
    """A model of transformers."""

    config: Any


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[P], P]:
    """Return a decorator that makes a function the parser of a kind of model.

    The function gets a `MegatronLMPlugin`, the model and a batch (or `None`), and writes arguments of Megatron-LM into
    the plugin's `megatron_lm_default_args`.
    """

    def register(parser: P) -> P:
        MODEL_CONFIGS_TO_MEGATRON_PARSERS[model_type] = parser
        return parser

    return register


def _length(batch_data: Mapping[str, Any] | None, key: str, otherwise: int) -> int:
    """Return the sequence length of a batch's tensor, in tokens."""
    if batch_data is None or key not in batch_data:
        return otherwise
    return int(batch_data[key].shape[1])


def _decoder(plugin: _Plugin, config: Any, batch_data: Mapping[str, Any] | None, tokenizer: str) -> dict[str, Any]:
    """Return what all decoder-only models of the Llama family have in common."""
    longest = getattr(config, "max_sequence_length", config.max_position_embeddings)
    length = plugin.decoder_seq_length or plugin.seq_length or _length(batch_data, "input_ids", longest)
    return {
        "return_logits": plugin.return_logits,
        "tokenizer_type": tokenizer,
        "model_type_name": "gpt",
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "orig_vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "seq_length": length,
        "model_return_dict": config.return_dict,
    }


@add_model_config_to_megatron_parser("megatron-bert")
def parse_bert_config(megatron_lm_plugin: _Plugin, model: _Model, batch_data: Mapping[str, Any] | None) -> None:
    """Describe a BERT to Megatron-LM."""
    config = model.config
    given = megatron_lm_plugin.encoder_seq_length or megatron_lm_plugin.seq_length
    name = type(model).__name__
    megatron_lm_plugin.megatron_lm_default_args |= {
        "seq_length": given or _length(batch_data, "input_ids", config.max_position_embeddings),
        "model_type_name": "bert",
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "ffn_hidden_size": config.intermediate_size,
        "norm_epsilon": config.layer_norm_eps,
        "pretraining_flag": "ForMaskedLM" in name or "ForPreTraining" in name,
        "bert_binary_head": "ForPreTraining" in name,
        "orig_vocab_size": config.vocab_size,
        "model_return_dict": config.return_dict,
        "num_labels": config.num_labels,
    }


@add_model_config_to_megatron_parser("gpt2")
def parse_gpt2_config(megatron_lm_plugin: _Plugin, model: _Model, batch_data: Mapping[str, Any] | None) -> None:
    """Describe a GPT-2 to Megatron-LM."""
    config = model.config
    given = megatron_lm_plugin.decoder_seq_length or megatron_lm_plugin.seq_length
    megatron_lm_plugin.megatron_lm_default_args |= {
        "seq_length": given or _length(batch_data, "input_ids", config.n_positions),
        "return_logits": megatron_lm_plugin.return_logits,
        "tokenizer_type": "GPT2BPETokenizer",
        "model_type_name": "gpt",
        "num_layers": config.n_layer,
        "hidden_size": config.n_embd,
        "num_attention_heads": config.n_head,
        "max_position_embeddings": config.n_positions,
        "ffn_hidden_size": config.n_inner,
        "norm_epsilon": config.layer_norm_epsilon,
        "eos_token_id": config.eos_token_id,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "pretraining_flag": True,
        "orig_vocab_size": config.vocab_size,
        "model_return_dict": config.return_dict,
    }


@add_model_config_to_megatron_parser("t5")
def parse_t5_config(megatron_lm_plugin: _Plugin, model: _Model, batch_data: Mapping[str, Any] | None) -> None:
    """Describe a T5 to Megatron-LM."""
    config = model.config
    longest = config.n_positions
    megatron_lm_plugin.megatron_lm_default_args |= {
        "encoder_seq_length": megatron_lm_plugin.encoder_seq_length or _length(batch_data, "input_ids", longest),
        "decoder_seq_length": megatron_lm_plugin.decoder_seq_length or _length(batch_data, "labels", longest),
        "model_type_name": "t5",
        "num_layers": config.num_layers,
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "encoder_num_layers": config.num_layers,
        "decoder_num_layers": config.num_decoder_layers,
        "ffn_hidden_size": config.d_ff,
        "kv_channels": config.d_kv,
        "decoder_start_token_id": getattr(config, "decoder_start_token_id", None),
        "pad_token_id": config.pad_token_id,
        "max_position_embeddings": longest,
        "pretraining_flag": True,
        "orig_vocab_size": config.vocab_size,
        "model_return_dict": config.return_dict,
    }


def _rotary_base(config: Any) -> float:
    """Return the base of rotary positions, which transformers keeps in one of two places."""
    found = getattr(config, "rope_theta", None) or (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    return float(found or 10000)


@add_model_config_to_megatron_parser("llama")
def parse_llama_config(megatron_lm_plugin: _Plugin, model: _Model, batch_data: Mapping[str, Any] | None) -> None:
    """Describe a Llama to Megatron-LM."""
    config = model.config
    megatron_lm_plugin.megatron_lm_default_args |= {
        **_decoder(megatron_lm_plugin, config, batch_data, "Llama2Tokenizer"),
        "pretraining_flag": True,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "normalization": "RMSNorm",
        "norm_epsilon": config.rms_norm_eps,
        "swiglu": True,
        "add_bias_linear": False,
        "ffn_hidden_size": config.intermediate_size,
        "kv_channels": getattr(config, "head_dim", None),
        "num_query_groups": config.num_key_value_heads,
        "rotary_base": _rotary_base(config),
        "eos_token_id": config.eos_token_id,
    }


@add_model_config_to_megatron_parser("glm4_moe")
def parse_glm4_moe_config(megatron_lm_plugin: _Plugin, model: _Model, batch_data: Mapping[str, Any] | None) -> None:
    """Describe a GLM-4 mixture of experts to Megatron-LM."""
    config = model.config
    dense = config.first_k_dense_replace
    megatron_lm_plugin.megatron_lm_default_args |= {
        **_decoder(megatron_lm_plugin, config, batch_data, "HuggingFaceTokenizer"),
        "pretraining_flag": False,
        "original_model_type": config.model_type,
        "eos_token_id": config.eos_token_id,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "normalization": "RMSNorm",
        "norm_epsilon": config.rms_norm_eps,
        "swiglu": True,
        "add_bias_linear": False,
        "ffn_hidden_size": config.intermediate_size,
        "kv_channels": config.head_dim,
        "qk_layernorm": config.use_qk_norm,
        "add_qkv_bias": config.attention_bias,
        "group_query_attention": True,
        "num_query_groups": config.num_key_value_heads,
        "use_flash_attn": True,
        "position_embedding_type": "rope",
        "rope_type": "rope",
        "rotary_base": _rotary_base(config),
        "rotary_percent": config.partial_rotary_factor,
        "num_experts": config.n_routed_experts,
        "moe_layer_freq": [0] * dense + [1] * (config.num_hidden_layers - dense),
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_pre_softmax": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
        "moe_aux_loss_coeff": 0,
    }
