"""Options of Megatron-LM."""

from typing import ClassVar

from accel_core._records import record
from accel_core.options.option import Prompt, boolean, boolean_as_text, option

__all__ = ["MegatronOptions"]


@record
class MegatronOptions:
    """How a model is split over ranks, and what is recomputed: the first fields of the plugin, in its order."""

    option_prefix: ClassVar[str] = "megatron_lm_"

    tp_degree: int | None = option(
        "MEGATRON_LM_TP_DEGREE",
        int,
        1,
        "Number of ranks that share each matrix product.",
        launch_default=1,
        prompt=Prompt(),
    )
    pp_degree: int | None = option(
        "MEGATRON_LM_PP_DEGREE", int, 1, "Number of pipeline stages.", launch_default=1, prompt=Prompt()
    )
    use_custom_fsdp: bool | None = option(
        "MEGATRON_LM_USE_CUSTOM_FSDP",
        boolean,
        False,
        "Whether Megatron's own FSDP shards the model.",
        launch_parser=boolean,
        launch_default=False,
    )
    overlap_cpu_optimizer_d2h_h2d: bool | None = option(
        "MEGATRON_LM_OVERLAP_CPU_OPTIMIZER_D2H_H2D",
        boolean,
        False,
        "Whether an offloaded optimizer copies and computes at the same time.",
        launch_parser=boolean,
        launch_default=False,
    )
    no_load_optim: bool | None = option(
        "MEGATRON_LM_NO_LOAD_OPTIM",
        boolean,
        False,
        "Whether optimizer states in a checkpoint are ignored.",
        launch_parser=boolean,
        launch_default=False,
    )
    eod_mask_loss: bool | None = option(
        "MEGATRON_LM_EOD_MASK_LOSS",
        boolean,
        False,
        "Whether end-of-document tokens are left out of the loss.",
        launch_parser=boolean,
        launch_default=False,
    )
    no_save_optim: bool | None = option(
        "MEGATRON_LM_NO_SAVE_OPTIM",
        boolean,
        False,
        "Whether checkpoints leave out optimizer states.",
        launch_parser=boolean,
        launch_default=False,
    )
    optimizer_cpu_offload: bool | None = option(
        "MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD",
        boolean,
        False,
        "Whether optimizer states live in CPU memory.",
        launch_parser=boolean,
        launch_default=False,
    )
    use_precision_aware_optimizer: bool | None = option(
        "MEGATRON_LM_USE_PRECISION_AWARE_OPTIMIZER",
        boolean,
        False,
        "Whether optimizer states may be kept in low precision.",
        launch_parser=boolean,
        launch_default=False,
    )
    decoder_last_pipeline_num_layers: int | None = option(
        "MEGATRON_LM_DECODER_LAST_PIPELINE_NUM_LAYERS",
        int,
        None,
        "Number of layers in the last pipeline stage, if it differs from the others.",
    )
    recompute_granularity: str | None = option(
        "MEGATRON_LM_RECOMPUTE_GRANULARITY",
        str,
        "full",
        "What the backward pass recomputes: full (layers) or selective (attention).",
    )
    recompute_method: str | None = option(
        "MEGATRON_LM_RECOMPUTE_METHOD",
        str,
        "uniform",
        "How the layers to recompute are chosen: uniform or block.",
    )
    recompute_num_layers: int | None = option(
        "MEGATRON_LM_RECOMPUTE_NUM_LAYERS",
        int,
        1,
        "Number of layers that are recomputed together.",
    )
    attention_backend: bool | None = option(
        "MEGATRON_LM_ATTENTION_BACKEND",
        boolean,
        True,
        "Whether Megatron chooses the attention kernel.",
        launch_parser=boolean_as_text,
    )
    expert_model_parallel_size: int | None = option(
        "MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE",
        int,
        1,
        "Number of ranks that share the experts of a layer.",
    )
    context_parallel_size: int | None = option(
        "MEGATRON_LM_CONTEXT_PARALLEL_SIZE", int, 1, "Number of ranks that share each sequence."
    )
    attention_dropout: float | None = option(
        "MEGATRON_LM_ATTENTION_DROPOUT", float, 0.0, "Dropout of attention weights, 0 to 1."
    )
    hidden_dropout: float | None = option("MEGATRON_LM_HIDDEN_DROPOUT", float, 0.0, "Dropout of hidden states, 0 to 1.")
    attention_softmax_in_fp32: bool | None = option(
        "MEGATRON_LM_ATTENTION_SOFTMAX_IN_FP32",
        boolean,
        True,
        "Whether attention's softmax computes in 32 bits.",
        launch_parser=boolean_as_text,
    )
    expert_tensor_parallel_size: int | None = option(
        "MEGATRON_LM_EXPERT_TENSOR_PARALLEL_SIZE",
        int,
        1,
        "Number of ranks that share each matrix product of an expert.",
    )
    calculate_per_token_loss: bool | None = option(
        "MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS",
        boolean,
        True,
        "Whether the loss is averaged over tokens instead of samples.",
        launch_parser=boolean_as_text,
    )
    use_rotary_position_embeddings: bool | None = option(
        "MEGATRON_LM_USE_ROTARY_POSITION_EMBEDDINGS",
        boolean,
        True,
        "Whether the model uses rotary position embeddings.",
        launch_parser=boolean_as_text,
    )
    num_micro_batches: int | None = option(
        "MEGATRON_LM_NUM_MICRO_BATCHES",
        int,
        1,
        "Number of micro batches that each batch is split into.",
        prompt=Prompt("1"),
    )
    gradient_clipping: float | None = option(
        "MEGATRON_LM_GRADIENT_CLIPPING",
        float,
        1.0,
        "Gradient norm to clip to; 0 turns clipping off.",
        launch_default=1.0,
        prompt=Prompt(),
    )
    sequence_parallelism: bool | None = option(
        "MEGATRON_LM_SEQUENCE_PARALLELISM",
        boolean,
        False,
        "Whether activations between matrix products are split along the sequence.",
        launch_parser=boolean_as_text,
        prompt=Prompt("no"),
    )
    recompute_activations: bool | None = option(
        "MEGATRON_LM_RECOMPUTE_ACTIVATIONS",
        boolean,
        False,
        "Whether attention's activations are recomputed in the backward pass.",
        launch_parser=boolean_as_text,
        prompt=Prompt("yes"),
    )
    use_distributed_optimizer: bool | None = option(
        "MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER",
        boolean,
        False,
        "Whether optimizer states are split over data-parallel ranks.",
        launch_parser=boolean_as_text,
        prompt=Prompt("no"),
    )
