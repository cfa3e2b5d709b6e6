"""Options of Megatron-LM."""

from typing import ClassVar

from accel_core._records import record
from accel_core.options.option import Prompt, boolean, boolean_as_text, option


@record
class MegatronOptions:
    """How a model is split over ranks, and what is recomputed: the first fields of the plugin, in its order."""

    option_prefix: ClassVar[str] = "megatron_lm_"

    tp_degree: int | None = option(
        1, "Number of ranks that share each matrix product.", launch_default=1, prompt=Prompt()
    )
    pp_degree: int | None = option(1, "Number of pipeline stages.", launch_default=1, prompt=Prompt())
    use_custom_fsdp: bool | None = option(
        False, "Whether Megatron's own FSDP shards the model.", launch_parser=boolean, launch_default=False
    )
    overlap_cpu_optimizer_d2h_h2d: bool | None = option(
        False,
        "Whether an offloaded optimizer copies and computes at the same time.",
        launch_parser=boolean,
        launch_default=False,
    )
    no_load_optim: bool | None = option(
        False, "Whether optimizer states in a checkpoint are ignored.", launch_parser=boolean, launch_default=False
    )
    eod_mask_loss: bool | None = option(
        False, "Whether end-of-document tokens are left out of the loss.", launch_parser=boolean, launch_default=False
    )
    no_save_optim: bool | None = option(
        False, "Whether checkpoints leave out optimizer states.", launch_parser=boolean, launch_default=False
    )
    optimizer_cpu_offload: bool | None = option(
        False, "Whether optimizer states live in CPU memory.", launch_parser=boolean, launch_default=False
    )
    use_precision_aware_optimizer: bool | None = option(
        False, "Whether optimizer states may be kept in low precision.", launch_parser=boolean, launch_default=False
    )
    decoder_last_pipeline_num_layers: int | None = option(
        None, "Number of layers in the last pipeline stage, if it differs from the others.", parser=int
    )
    recompute_granularity: str | None = option(
        "full", "What the backward pass recomputes: full (layers) or selective (attention)."
    )
    recompute_method: str | None = option("uniform", "How the layers to recompute are chosen: uniform or block.")
    recompute_num_layers: int | None = option(1, "Number of layers that are recomputed together.")
    attention_backend: bool | None = option(
        True, "Whether Megatron chooses the attention kernel.", launch_parser=boolean_as_text
    )
    expert_model_parallel_size: int | None = option(1, "Number of ranks that share the experts of a layer.")
    context_parallel_size: int | None = option(1, "Number of ranks that share each sequence.")
    attention_dropout: float | None = option(0.0, "Dropout of attention weights, 0 to 1.")
    hidden_dropout: float | None = option(0.0, "Dropout of hidden states, 0 to 1.")
    attention_softmax_in_fp32: bool | None = option(
        True, "Whether attention's softmax computes in 32 bits.", launch_parser=boolean_as_text
    )
    expert_tensor_parallel_size: int | None = option(1, "Number of ranks that share each matrix product of an expert.")
    calculate_per_token_loss: bool | None = option(
        True, "Whether the loss is averaged over tokens instead of samples.", launch_parser=boolean_as_text
    )
    use_rotary_position_embeddings: bool | None = option(
        True, "Whether the model uses rotary position embeddings.", launch_parser=boolean_as_text
    )
    num_micro_batches: int | None = option(
        1, "Number of micro batches that each batch is split into.", prompt=Prompt("1")
    )
    gradient_clipping: float | None = option(
        1.0, "Gradient norm to clip to; 0 turns clipping off.", launch_default=1.0, prompt=Prompt()
    )
    sequence_parallelism: bool | None = option(
        False,
        "Whether activations between matrix products are split along the sequence.",
        launch_parser=boolean_as_text,
        prompt=Prompt("no"),
    )
    recompute_activations: bool | None = option(
        False,
        "Whether attention's activations are recomputed in the backward pass.",
        launch_parser=boolean_as_text,
        prompt=Prompt("yes"),
    )
    use_distributed_optimizer: bool | None = option(
        False,
        "Whether optimizer states are split over data-parallel ranks.",
        launch_parser=boolean_as_text,
        prompt=Prompt("no"),
    )
