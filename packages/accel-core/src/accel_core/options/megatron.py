"""Options of Megatron-LM."""

from accel_core._records import record
from accel_core.options.option import Asked, boolean, boolean_as_text, option

__all__ = ["MegatronOptions"]


@record(frozen=True)
class MegatronOptions:
    """How a model is cut over ranks, and what is computed again."""

    megatron_lm_tp_degree: int = option(
        "MEGATRON_LM_TP_DEGREE",
        int,
        1,
        "Ranks that share one matrix product.",
        field="tp_degree",
        launch_default=1,
        asked=Asked(),
    )
    megatron_lm_pp_degree: int = option(
        "MEGATRON_LM_PP_DEGREE", int, 1, "Stages of the pipeline.", field="pp_degree", launch_default=1, asked=Asked()
    )
    megatron_lm_num_micro_batches: int = option(
        "MEGATRON_LM_NUM_MICRO_BATCHES",
        int,
        1,
        "Number of parts that a batch is cut into for the pipeline.",
        field="num_micro_batches",
        asked=Asked("1"),
    )
    megatron_lm_sequence_parallelism: bool = option(
        "MEGATRON_LM_SEQUENCE_PARALLELISM",
        boolean,
        False,
        "Whether activations between matrix products are split along the sequence.",
        field="sequence_parallelism",
        launch_parser=boolean_as_text,
        asked=Asked("no"),
    )
    megatron_lm_recompute_activations: bool = option(
        "MEGATRON_LM_RECOMPUTE_ACTIVATIONS",
        boolean,
        False,
        "Whether attention's activations are computed again in the backward pass.",
        field="recompute_activations",
        launch_parser=boolean_as_text,
        asked=Asked("yes"),
    )
    megatron_lm_use_distributed_optimizer: bool = option(
        "MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER",
        boolean,
        False,
        "Whether optimizer states are split over data-parallel ranks.",
        field="use_distributed_optimizer",
        launch_parser=boolean_as_text,
        asked=Asked("no"),
    )
    megatron_lm_gradient_clipping: float = option(
        "MEGATRON_LM_GRADIENT_CLIPPING",
        float,
        1.0,
        "Largest norm of the gradient; 0 does not clip.",
        field="gradient_clipping",
        launch_default=1.0,
        asked=Asked(),
    )
    megatron_lm_use_custom_fsdp: bool = option(
        "MEGATRON_LM_USE_CUSTOM_FSDP",
        boolean,
        False,
        "Whether Megatron's own FSDP shards the model.",
        field="use_custom_fsdp",
        launch_parser=boolean,
        launch_default=False,
    )
    megatron_lm_overlap_cpu_optimizer_d2h_h2d: bool = option(
        "MEGATRON_LM_OVERLAP_CPU_OPTIMIZER_D2H_H2D",
        boolean,
        False,
        "Whether copies of an offloaded optimizer overlap with its work.",
        field="overlap_cpu_optimizer_d2h_h2d",
        launch_parser=boolean,
        launch_default=False,
    )
    megatron_lm_no_load_optim: bool = option(
        "MEGATRON_LM_NO_LOAD_OPTIM",
        boolean,
        False,
        "Whether optimizer states in a checkpoint are passed over.",
        field="no_load_optim",
        launch_parser=boolean,
        launch_default=False,
    )
    megatron_lm_eod_mask_loss: bool = option(
        "MEGATRON_LM_EOD_MASK_LOSS",
        boolean,
        False,
        "Whether end-of-document tokens are left out of the loss.",
        field="eod_mask_loss",
        launch_parser=boolean,
        launch_default=False,
    )
    megatron_lm_no_save_optim: bool = option(
        "MEGATRON_LM_NO_SAVE_OPTIM",
        boolean,
        False,
        "Whether checkpoints leave out optimizer states.",
        field="no_save_optim",
        launch_parser=boolean,
        launch_default=False,
    )
    megatron_lm_optimizer_cpu_offload: bool = option(
        "MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD",
        boolean,
        False,
        "Whether optimizer states live in CPU memory.",
        field="optimizer_cpu_offload",
        launch_parser=boolean,
        launch_default=False,
    )
    megatron_lm_use_precision_aware_optimizer: bool = option(
        "MEGATRON_LM_USE_PRECISION_AWARE_OPTIMIZER",
        boolean,
        False,
        "Whether optimizer states may be kept in low precision.",
        field="use_precision_aware_optimizer",
        launch_parser=boolean,
        launch_default=False,
    )
    megatron_lm_decoder_last_pipeline_num_layers: int | None = option(
        "MEGATRON_LM_DECODER_LAST_PIPELINE_NUM_LAYERS",
        int,
        None,
        "Number of layers in the last stage where it differs from the others.",
        field="decoder_last_pipeline_num_layers",
    )
    megatron_lm_recompute_granularity: str = option(
        "MEGATRON_LM_RECOMPUTE_GRANULARITY",
        str,
        "full",
        "What is computed again in the backward pass: full or selective.",
        field="recompute_granularity",
    )
    megatron_lm_recompute_method: str = option(
        "MEGATRON_LM_RECOMPUTE_METHOD",
        str,
        "uniform",
        "How the layers to compute again are chosen: uniform or block.",
        field="recompute_method",
    )
    megatron_lm_recompute_num_layers: int = option(
        "MEGATRON_LM_RECOMPUTE_NUM_LAYERS",
        int,
        1,
        "Number of layers that are computed again together.",
        field="recompute_num_layers",
    )
    megatron_lm_attention_backend: bool = option(
        "MEGATRON_LM_ATTENTION_BACKEND",
        boolean,
        True,
        "Whether Megatron chooses the attention kernel.",
        field="attention_backend",
        launch_parser=boolean_as_text,
    )
    megatron_lm_expert_model_parallel_size: int = option(
        "MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE",
        int,
        1,
        "Ranks that share the experts of a layer.",
        field="expert_model_parallel_size",
    )
    megatron_lm_context_parallel_size: int = option(
        "MEGATRON_LM_CONTEXT_PARALLEL_SIZE", int, 1, "Ranks that share one sequence.", field="context_parallel_size"
    )
    megatron_lm_attention_dropout: float = option(
        "MEGATRON_LM_ATTENTION_DROPOUT", float, 0.0, "Dropout of attention weights, 0 to 1.", field="attention_dropout"
    )
    megatron_lm_hidden_dropout: float = option(
        "MEGATRON_LM_HIDDEN_DROPOUT", float, 0.0, "Dropout of hidden states, 0 to 1.", field="hidden_dropout"
    )
    megatron_lm_attention_softmax_in_fp32: bool = option(
        "MEGATRON_LM_ATTENTION_SOFTMAX_IN_FP32",
        boolean,
        True,
        "Whether attention's softmax computes in 32 bits.",
        field="attention_softmax_in_fp32",
        launch_parser=boolean_as_text,
    )
    megatron_lm_expert_tensor_parallel_size: int = option(
        "MEGATRON_LM_EXPERT_TENSOR_PARALLEL_SIZE",
        int,
        1,
        "Ranks that share one matrix product of an expert.",
        field="expert_tensor_parallel_size",
    )
    megatron_lm_calculate_per_token_loss: bool = option(
        "MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS",
        boolean,
        True,
        "Whether the loss is averaged over tokens instead of samples.",
        field="calculate_per_token_loss",
        launch_parser=boolean_as_text,
    )
    megatron_lm_use_rotary_position_embeddings: bool = option(
        "MEGATRON_LM_USE_ROTARY_POSITION_EMBEDDINGS",
        boolean,
        True,
        "Whether positions are embedded by rotation.",
        field="use_rotary_position_embeddings",
        launch_parser=boolean_as_text,
    )
