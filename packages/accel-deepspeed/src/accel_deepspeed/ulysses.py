"""Ulysses sequence parallel: attention of transformers' models over ranks that share sequences.

Each rank holds a part of every sequence. Before attention, ranks exchange tokens for heads, so that each computes some
heads over whole sequences; afterwards they exchange back. DeepSpeed does the exchange, but only for one model, for one
batch size and for calls on parts. Here each model has its own exchange for batches of any size, and calls on whole
sequences (evaluation, generation) skip it.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.weak import WeakIdKeyDictionary

from accel_core.errors import ConfigurationError, PreparationError
from accel_core.mesh.layout import Layout
from accel_core.plugins.parallelism import DeepSpeedSequenceParallelConfig, ParallelismConfig, is_shared
from accel_core.strategies.bundle import Bundle
from accel_core.strategies.parts import Parts
from accel_deepspeed import sequences
from accel_deepspeed.zero_layout import SHARDED_STAGE

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from transformers import PretrainedConfig

_Attention = Callable[..., tuple[torch.Tensor, Any]]

_WHOLE_LAYERS = ("full_attention", "attention")
"""Types of layers that see whole sequences through the model's attention function."""

_shared: MutableMapping[torch.nn.Module, tuple[ReferenceType[Ulysses], Any]] = WeakIdKeyDictionary()
"""For each module of a model on parts, its exchange, and how many heads share keys and values."""
_installed: set[str] = set()


class SequenceParallel:
    """How the ranks of a run share sequences: the process groups, the models, and the loaders."""

    def __init__(
        self, layout: Layout, parallelism: ParallelismConfig, handler: DeepSpeedSequenceParallelConfig
    ) -> None:
        self.size = layout.size("sp")
        self._layout = layout
        self._parallelism = parallelism
        self._handler = handler
        self._attentions: list[Ulysses] = []

    @classmethod
    def of(cls, parts: Parts) -> SequenceParallel | None:
        """Return the sequence parallelism of a run, or `None` if it has none."""
        axes, layout = parts.parallelism, parts.layout
        if axes is None or axes.sp_handler is None or layout.size("sp") == 1:
            return None
        return cls(layout, axes, axes.sp_handler)

    def mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh in which scripts find the ranks that share sequences, under "sp"; every rank calls it."""
        if self._parallelism.device_mesh is None:  # another Accelerator of the run may have laid it out
            names, sizes = zip(*((axis, size) for axis, size in self._layout.sizes if size > 1), strict=True)
            self._parallelism.device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        return self._parallelism.device_mesh

    def refuse(self, bundle: Bundle, parts: Parts) -> None:
        """Refuse models that sequence parallelism does not support.

        Raises:
            ConfigurationError: DeepSpeed's configuration would sum the gradients of some parameters and not of
                others.
            PreparationError: A model is not supported.
        """
        config = parts.plugin.hf_ds_config
        if config.is_zero3() and config.is_false("zero_optimization.reduce_scatter"):
            raise ConfigurationError(
                "Sequence parallelism in stage 3 needs reduce_scatter; got zero_optimization.reduce_scatter=false. "
                "Set it to true."
            )
        for slot in bundle.models:
            refuse(slot.given, self.size, self._handler)

    def join(self, model: torch.nn.Module) -> Any:
        """Make a model compute on parts of sequences; every rank calls it."""
        groups = groups_of(self.size)
        self._attentions.append(Ulysses(model, groups))
        return groups

    def sums(self, engine: DeepSpeedEngine) -> int:
        """Return the number of ranks over which an engine sums gradients instead of averaging them.

        DeepSpeed sums them over the ranks that share a sequence; in stage 3 it averages over all ranks.
        """
        return self.size if engine.zero_optimization_stage() < SHARDED_STAGE else 1

    def adapt(self, loader: object, model: torch.nn.Module, *, fills: bool) -> None:
        """Make a prepared loader return parts of sequences; see `sequences.adapt`."""
        handler, layout = self._handler, self._layout
        length = None if handler.sp_seq_length_is_variable else handler.sp_seq_length
        packs = _packs(_text_config(model)._attn_implementation)
        sharing = sequences.Sharing(layout.place(("sp",)), self.size, length, packs)
        sequences.adapt(loader, layout, sharing, fills=fills)


def _packs(implementation: str) -> bool:
    """Return whether an attention separates sequences packed into one row, by their positions."""
    return implementation != "sdpa"  # flash attentions tell packed sequences apart by their positions


def refuse(model: torch.nn.Module, size: int, handler: DeepSpeedSequenceParallelConfig) -> None:
    """Refuse a model whose attention cannot be computed over ranks that share sequences."""
    kind, config = type(model).__name__, _text_config(model)
    used = getattr(config, "_attn_implementation", None)
    if config is None or used is None:
        raise PreparationError(
            f"Sequence parallelism supports transformers' models only; got a model of type {kind} without a "
            "transformers configuration. Train it without sp_size."
        )
    asked = handler.sp_attn_implementation or used
    if used != asked or not is_shared(used) or used not in _functions():
        raise PreparationError(
            "Sequence parallelism needs an attention that works without a mask and is the one the model uses; got "
            f"{kind} with {used!r} and sp_attn_implementation={handler.sp_attn_implementation!r}. Load the model with "
            "attn_implementation='sdpa' or a flash attention, and name the same one."
        )
    heads, shared = getattr(config, "num_attention_heads", 0), getattr(config, "num_key_value_heads", None)
    if shared is None:
        raise PreparationError(
            f"Sequence parallelism needs a model that passes position_ids to its attention; got {kind}, whose "
            "configuration has no num_key_value_heads. Use another model (Llama, Qwen, Mistral, …)."
        )
    if heads % size or (shared % size and size % shared):  # fewer key-value heads are copied, if they divide evenly
        raise PreparationError(
            f"Ranks that share a sequence divide the attention heads; got {heads} heads and {shared} key-value heads "
            f"for sp_size={size}. Use an sp_size that divides both."
        )
    _refuse_layers(model, config, used, handler)


def _refuse_layers(
    model: torch.nn.Module, config: PretrainedConfig, used: str, handler: DeepSpeedSequenceParallelConfig
) -> None:
    """Refuse layers other than full, causal attention."""
    kinds = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    window = getattr(config, "sliding_window", None)
    if not kinds and window is not None:
        kinds = {"sliding_attention"}
    fixed = None if handler.sp_seq_length_is_variable else handler.sp_seq_length
    if _packs(used) or (fixed is not None and window is not None and fixed <= window):  # the window hides nothing
        kinds.discard("sliding_attention")
    wrong = sorted(kinds.difference(_WHOLE_LAYERS))
    if wrong:
        raise PreparationError(
            f"With {used!r}, sequence parallelism supports full attention and no other layer that mixes tokens; got "
            f"{type(model).__name__} with {', '.join(wrong)}. Use a flash attention for sliding windows, or a model "
            "with full attention."
        )
    open_ended = [name for name, module in model.named_modules() if getattr(module, "is_causal", True) is False]
    if open_ended or config.is_encoder_decoder:
        raise PreparationError(
            "Sequence parallelism does not pass masks to attention, so attention has to be causal; got "
            f"{type(model).__name__} with {', '.join(open_ended[:3]) or 'an encoder'}. Train it without sp_size."
        )


def _text_config(model: torch.nn.Module) -> PretrainedConfig:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _functions() -> Any:
    return importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS


def groups_of(size: int) -> Any:
    """Return DeepSpeed's sequence-parallel groups; the first call creates them, on every rank."""
    importlib.import_module("deepspeed").init_distributed(verbose=False)
    groups = importlib.import_module("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    with contextlib.suppress(AssertionError):  # how DeepSpeed reports that there are some, which the engine compares
        groups.initialize_sequence_parallel(size)
    return groups


class Ulysses:
    """The attention of one model, which exchanges heads for tokens between ranks."""

    def __init__(self, model: torch.nn.Module, groups: Any) -> None:
        library = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
        config = _text_config(model)
        self._exchange = library.UlyssesSPAttentionHF
        self._group = groups.get_sequence_parallel_group()
        self._size = groups.get_sequence_parallel_world_size()
        self._packs = _packs(config._attn_implementation)
        self._facts: dict[str, Any] = {
            "attn_head_count": config.num_attention_heads,
            "attn_head_size": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            "kv_head_count": config.num_key_value_heads,
            "num_hidden_layers": config.num_hidden_layers,
            "process_group": self._group,
            "seq_length_is_variable": True,
        }
        self._by_rows: dict[int, Any] = {}
        self._known: set[tuple[int, int]] = set()
        for module in model.modules():
            _shared[module] = ref(self), getattr(module, "num_key_value_groups", None)
        _install(config._attn_implementation)

    def __call__(
        self, core: _Attention, module: Any, query: torch.Tensor, key: torch.Tensor, *given: object, **kwargs: Any
    ) -> tuple[torch.Tensor, Any]:
        """Compute attention: with an exchange for parts of sequences, or else as the model does."""
        if not self._holds_parts(module, query, key, kwargs.get("position_ids")):
            return core(module, query, key, *given, **kwargs)
        rows = query.shape[0]
        if rows not in self._by_rows:
            self._by_rows[rows] = self._exchange(attn=core, batch_size=rows, **self._facts)
        value, _, *others = given  # the mask covers this rank's part alone, and causal attention needs none
        found: tuple[torch.Tensor, Any] = self._by_rows[rows](module, query, key, value, None, *others, **kwargs)
        return found

    def _holds_parts(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None
    ) -> bool:
        """Return whether a call computes on parts of sequences; the answer is the same on all ranks that share them."""
        fed = sequences.feeds_parts()
        if query.shape[2] != key.shape[2] or not (module.training or fed):
            return False
        if positions is None:
            raise PreparationError(
                "Sequence parallelism needs position_ids in every attention layer; got none in "
                f"{type(module).__name__}. Train this model without sp_size."
            )
        shape = (query.shape[0], query.shape[2])
        # In training, check each shape once, because the answer waits for the device. In evaluation, check each call:
        # a loop over parts may also run whole prompts.
        if self._packs or (module.training and fed and shape in self._known):
            return fed
        continues = self._continues(positions)
        if module.training and not continues:
            raise PreparationError(
                f"Sequence parallelism trains on parts of sequences; got whole ones, of {shape[1]} tokens, whose "
                "positions do not continue from rank to rank. Prepare the loader together with the model, or call "
                "accelerator.deepspeed_ulysses_dl_adapter(loader, model)."
            )
        if continues:
            self._known.add(shape)
        return continues

    def _continues(self, positions: torch.Tensor) -> bool:
        """Return whether positions continue from each rank to the next."""
        ends = positions[0, [0, -1]].to(torch.int64).contiguous()
        found = [torch.empty_like(ends) for _ in range(self._size)]
        torch.distributed.all_gather(found, ends, group=self._group)
        pairs = torch.stack(found).tolist()
        return all(after[0] == before[1] + 1 for before, after in itertools.pairwise(pairs))


def _install(implementation: str) -> None:
    """Replace an attention of transformers by one that handles models on parts, once per process."""
    functions = _functions()
    if implementation in _installed:
        return
    core: _Attention = functions[implementation]

    def attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        reference, shared = _shared.get(module, (None, None))
        own = None if reference is None else reference()
        if own is None:
            return core(module, *args, **kwargs)
        if shared is not None:
            module.num_key_value_groups = shared  # DeepSpeed changes it where ranks hold copies of keys and values
        return own(core, module, *args, **kwargs)

    functions[implementation] = attention
    _installed.add(implementation)
