"""megatron-core's GPT, BERT and T5: the part of the model that one pipeline stage holds."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accel_core.errors import ConfigurationError, EngineUnavailableError
from accel_megatron import library
from accel_megatron.arguments import configured, number_format
from accel_megatron.groups import seed_of
from accel_megatron.norms import shared_sequences
from accel_megatron.run import MegatronRun, current

KINDS = ("gpt", "bert", "t5")


def refuse_unbuilt(arguments: Namespace) -> None:
    """Refuse models that megatron-core cannot build.

    Raises:
        ConfigurationError: The kind of model is unknown.
        EngineUnavailableError: megatron-core has no such head, pipeline or virtual stages for this kind of model.
    """
    kind = arguments.model_type_name
    if kind not in KINDS:
        raise ConfigurationError(
            f"megatron-core can build {', '.join(KINDS)}; got model_type_name={kind!r}. Make the model's parser set "
            "one of these, or set custom_model_provider_function and custom_train_step_class."
        )
    if kind == "bert" and not arguments.pretraining_flag:
        raise EngineUnavailableError(
            "megatron-core's BERT has only the pretraining heads; got a model with another head. Use a "
            "MegatronBertForPreTraining or MegatronBertForMaskedLM, or set custom_model_provider_function and "
            "custom_train_step_class."
        )
    if arguments.num_experts and not library.has_transformer_engine():
        raise EngineUnavailableError(
            "Mixture of experts in megatron-core needs Transformer Engine, which is not installed; got "
            f"num_experts={arguments.num_experts}. Install it, or train a dense model."
        )
    stages = arguments.pipeline_model_parallel_size or 1
    if kind == "t5" and stages > 1:
        raise EngineUnavailableError(
            f"megatron-core cannot pipeline an encoder-decoder model; got a T5 and pp_degree={stages}. Set "
            "pp_degree=1 and use tp_degree."
        )
    if kind != "gpt" and arguments.num_layers_per_virtual_pipeline_stage is not None:
        raise EngineUnavailableError(
            f"Only a GPT can have virtual stages; got num_layers_per_virtual_pipeline_stage for a {kind}. Leave it out."
        )


def configuration(run: MegatronRun, **own: object) -> Any:
    """Return megatron-core's configuration of the model's layers."""
    arguments = run.arguments
    enums = library.core("transformer.enums")
    dtype = number_format(arguments)
    fields: dict[str, Any] = {
        "attention_backend": enums.AttnBackend.auto if arguments.attention_backend else enums.AttnBackend.local,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
    }
    if run.device.type == "cpu":  # else it initializes on the current CUDA device
        fields["use_cpu_initialization"] = True
    if (arguments.pipeline_model_parallel_size or 1) == 1:
        fields["num_layers_in_last_pipeline_stage"] = None
    if arguments.swiglu:
        fields |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    if run.plugin.custom_train_step_class is not None or run.plugin.custom_loss_function is not None:
        # Such a loss may return a mean, which megatron-core does not divide by the number of tokens.
        fields["calculate_per_token_loss"] = False
    return configured(library.core("transformer.transformer_config").TransformerConfig, arguments, **(fields | own))


def model_provider_func(
    pre_process: bool = True, post_process: bool = True, add_encoder: bool = True, add_decoder: bool = True
) -> nn.Module:
    """Build this stage's part of the model."""
    run = current()
    kind = run.arguments.model_type_name
    if kind == "gpt":
        return _gpt(run, pre_process, post_process)
    if kind == "bert":
        return _bert(run, pre_process, post_process)
    return _t5(run, add_encoder, add_decoder)


def _shared(arguments: Namespace) -> dict[str, Any]:
    return {
        "vocab_size": arguments.padded_vocab_size,
        "max_sequence_length": arguments.max_position_embeddings,
        # Else each rank would have logits of a part of the vocabulary.
        "parallel_output": not arguments.return_logits,
        "share_embeddings_and_output_weights": not arguments.untie_embeddings_and_output_weights,
        "position_embedding_type": arguments.position_embedding_type,
        "rotary_percent": arguments.rotary_percent,
    }


def _gpt(run: MegatronRun, pre_process: bool, post_process: bool, vp_stage: int | None = None) -> nn.Module:
    arguments = run.arguments
    config = configuration(run)
    fast = library.has_transformer_engine() and run.device.type != "cpu"
    specs = library.core("models.gpt.gpt_layer_specs")
    spec = specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=fast, normalization=config.normalization, vp_stage=vp_stage
    )
    made: nn.Module = library.core("models.gpt").GPTModel(
        config=config,
        transformer_layer_spec=spec,
        pre_process=pre_process,
        post_process=post_process,
        rotary_base=arguments.rotary_base,
        vp_stage=vp_stage,
        **_shared(arguments),
    )
    return made


def _bert(run: MegatronRun, pre_process: bool, post_process: bool) -> nn.Module:
    specs = library.core("models.bert.bert_layer_specs")
    fast = library.has_transformer_engine() and run.device.type != "cpu"
    spec = specs.get_bert_layer_with_transformer_engine_spec() if fast else specs.bert_layer_local_spec
    made: nn.Module = library.core("models.bert.bert_model").BertModel(
        config=configuration(run),
        num_tokentypes=2,
        transformer_layer_spec=spec,
        pre_process=pre_process,
        post_process=post_process,
        add_binary_head=run.arguments.bert_binary_head,
        **_shared(run.arguments),
    )
    return made


def _t5(run: MegatronRun, add_encoder: bool, add_decoder: bool) -> nn.Module:
    arguments = run.arguments
    specs = library.core("models.T5.t5_spec")
    blocks = library.core("transformer.transformer_block")
    fast = library.has_transformer_engine() and run.device.type != "cpu"
    encoder = specs.encoder_model_with_transformer_engine_default_spec if fast else specs.encoder_model_with_local_spec
    decoder = specs.decoder_model_with_transformer_engine_default_spec if fast else specs.decoder_model_with_local_spec
    norm = specs.TENorm if fast else specs.LNImpl
    layers = {"encoder": arguments.encoder_num_layers, "decoder": arguments.decoder_num_layers}

    def block(layer: Callable[[], Any], count: int) -> Any:
        return blocks.TransformerBlockSubmodules([layer()] * count, layer_norm=norm)

    made: nn.Module = library.core("models.T5").T5Model(
        config=configuration(run, num_layers=layers["decoder"]),
        encoder_config=configuration(run, num_layers=layers["encoder"]),
        transformer_encoder_layer_spec=block(encoder, layers["encoder"]),
        transformer_decoder_layer_spec=block(decoder, layers["decoder"]),
        add_encoder=add_encoder,
        add_decoder=add_decoder,
        **_shared(arguments),
    )
    return made


def build(run: MegatronRun) -> list[nn.Module]:
    """Return this rank's parts of the model, one per virtual stage, in megatron-core's data-parallel wrapper.

    Weights are initialized at random, equally for any number of data-parallel ranks.
    """
    _seed(run)
    provider = run.plugin.custom_model_provider_function or model_provider_func
    if run.plugin.custom_prepare_model_function is not None:
        return list(run.plugin.custom_prepare_model_function(provider))
    with torch.random.fork_rng(devices=[]):  # the user's own random numbers go on as before
        # On the CPU megatron-core draws whole weights and keeps a part: ranks of one stage have to draw the same.
        torch.manual_seed(seed_of(run) + 100 * run.layout.place(("pp",)))
        with shared_sequences(run.arguments):
            chunks = [chunk.to(run.device) for chunk in _chunks(run, provider)]
    if number_format(run.arguments) != torch.float32:  # its optimizer then keeps the 32-bit masters
        module = library.core("transformer.module")
        chunks = [module.Float16Module(chunk.config, chunk) for chunk in chunks]
    return [_in_parallel(run, chunk, first=index == 0) for index, chunk in enumerate(chunks)]


def _seed(run: MegatronRun) -> None:
    """Seed megatron-core's own generators, with which tensor-parallel ranks draw different dropout."""
    generators = library.core("tensor_parallel.random")
    generators.model_parallel_cuda_manual_seed(seed_of(run) + 100 * run.layout.place(("pp",)), force_reset_rng=True)


def _chunks(run: MegatronRun, provider: Callable[..., nn.Module]) -> list[nn.Module]:
    state = library.core("parallel_state")
    virtual = run.arguments.virtual_pipeline_model_parallel_size
    if virtual is None:
        return [provider(state.is_pipeline_first_stage(), state.is_pipeline_last_stage())]
    made = []
    for stage in range(virtual):
        place = {"ignore_virtual": False, "vp_stage": stage}
        ends = state.is_pipeline_first_stage(**place), state.is_pipeline_last_stage(**place)
        # Only our provider knows virtual stages.
        made.append(_gpt(run, ends[0], ends[1], stage) if provider is model_provider_func else provider(*ends))
    return made


def _in_parallel(run: MegatronRun, chunk: nn.Module, *, first: bool) -> nn.Module:
    parallel = library.core("distributed")
    config = configured(
        parallel.DistributedDataParallelConfig,
        run.arguments,
        use_distributed_optimizer=bool(run.arguments.use_distributed_optimizer),
    )
    made: nn.Module = parallel.DistributedDataParallel(
        chunk.config,
        config,
        chunk,
        disable_bucketing=not first,  # communication of later chunks overlaps with computation anyway
    )
    return made
