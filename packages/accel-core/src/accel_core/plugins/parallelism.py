"""How ranks are laid out on a mesh: its axes, their sizes and what each is for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from accel_core._passed import Passed
from accel_core._records import record
from accel_core.errors import ConfigurationError, expect, expect_flags
from accel_core.mesh.layout import GROUPS, MESH_AXES
from accel_core.options.option import fill
from accel_core.options.parallelism import ParallelismOptions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_H = TypeVar("_H")
_TOGETHER = ("tp", "cp", "sp", "pp")
_SHARED_ATTENTIONS = ("sdpa", "flash_attention_2", "flash_attention_3")
"""Attentions of transformers that work without a mask, on a part of the heads; kernels of the hub have owner/name."""


def is_shared(attention: str) -> bool:
    """Return whether ranks can divide the heads of an attention."""
    return attention in _SHARED_ATTENTIONS or "/" in attention


def _active(*axes: str) -> Callable[[ParallelismConfig], list[str]]:
    """Return what names, of a configuration, those of some axes along which several ranks lie."""
    return lambda config: [axis for axis in axes if config.sizes[axis] > 1]


def _several(axis: str) -> Callable[[ParallelismConfig], bool]:
    """Return what says of a configuration whether several ranks lie along an axis."""
    return lambda config: config.sizes[axis] > 1


def _written(handler: object) -> dict[str, Any]:
    """Return the fields of a handler, with the styles of a plan by name, because JSON cannot hold them."""
    found = vars(handler).copy()
    if isinstance(found.get("tp_plan"), Mapping):
        plan = found["tp_plan"].items()
        found["tp_plan"] = {key: style if isinstance(style, str) else type(style).__name__ for key, style in plan}
    return found


@record
class TorchContextParallelConfig:
    """How context parallelism exchanges keys and values.

    Args:
        cp_comm_strategy: "allgather" gathers them once, "alltoall" passes them on in a ring; read from
            PARALLELISM_CONFIG_CP_COMM_STRATEGY where `None`.

    Raises:
        ConfigurationError: The strategy is neither.

    Examples:
        >>> handler = TorchContextParallelConfig(cp_comm_strategy="alltoall")
        >>> config = ParallelismConfig(dp_shard_size=2, cp_size=2, cp_handler=handler)
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        """Fill the strategy from the environment."""
        fill(self, ParallelismOptions, "cp_comm_strategy")


@record
class DeepSpeedSequenceParallelConfig:
    """Settings of Ulysses sequence parallelism for sequences and attention.

    Args:
        sp_seq_length: Length of all sequences in tokens, where it is fixed.
        sp_seq_length_is_variable: Whether sequences differ in length from batch to batch.
        sp_attn_implementation: Attention that each rank uses for its heads, by its name in transformers.

    Raises:
        ConfigurationError: The attention cannot compute a part of the heads, or a fixed length is missing.

    Examples:
        >>> handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
        >>> config = ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=handler)
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        """Fill what is left open from the environment."""
        fill(self, ParallelismOptions, "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation")
        expect_flags(type(self), vars(self))
        asked = self.sp_attn_implementation
        if asked is not None and not is_shared(asked):
            raise ConfigurationError(
                "Sequence parallelism needs an attention that computes on a part of the heads; got "
                f"sp_attn_implementation={asked!r}. Use one of {', '.join(_SHARED_ATTENTIONS)}, or a flash attention "
                "of the hub."
            )
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ConfigurationError(
                "Sequences of one length need that length; got sp_seq_length_is_variable=False and no sp_seq_length "
                "(PARALLELISM_CONFIG_SP_SEQ_LENGTH). Set it, or leave sp_seq_length_is_variable at True."
            )


@record
class TorchTensorParallelConfig:
    """How matrix products are split.

    Args:
        enable_async_tp: Whether communication overlaps with the products, in models that are compiled for CUDA; on
            other devices it only warns, as Accelerate does on all.
        tp_plan: Which modules are split, and how: for patterns of dotted names ("layers.*.up"), styles of
            `torch.distributed.tensor.parallel` or the names that transformers has for them. "auto" uses the
            model's own `tp_plan`, and accepts models that arrive split. Not part of Accelerate.

    Raises:
        ConfigurationError: The plan is neither "auto" nor has entries.

    Examples:
        >>> plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        >>> config = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(tp_plan=plan))
    """

    enable_async_tp: bool = False
    tp_plan: Mapping[str, Any] | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        """Refuse what is not a plan."""
        expect_flags(type(self), vars(self))
        if self.tp_plan != "auto" and not (isinstance(self.tp_plan, Mapping) and self.tp_plan):
            raise ConfigurationError(
                "A plan of tensor parallel maps patterns of module names to styles; got "
                f"tp_plan={self.tp_plan!r}. Pass such a dict, or 'auto' for the plan that the model has."
            )


@record
class TorchTensorParallelPlugin:
    """Number of ranks that share one matrix product; `ParallelismConfig(tp_size=…)` does the same and more.

    Args:
        tp_size: The number of ranks.
        torch_device_mesh: The mesh of the run, where it exists already.

    Examples:
        >>> plugin = TorchTensorParallelPlugin(tp_size=2)
        >>> accelerator = Accelerator(torch_tp_plugin=plugin)  # doctest: +SKIP
    """

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | None = None


@record
class ParallelismConfig:
    """Number of ranks along each axis of the mesh; a size left at `None` is read from PARALLELISM_CONFIG_*.

    The ranks of the run are laid out in the order pp, dp_replicate, dp_shard, ep, cp, sp, tp, the last varying fastest,
    so that ranks that talk most are neighbors.

    Args:
        dp_replicate_size: Number of copies of the model.
        dp_shard_size: Number of ranks that shard each copy of the model.
        tp_size: Number of ranks that share each matrix product.
        cp_size: Number of ranks that share each sequence by context parallelism.
        cp_backend: Library for context parallelism: "torch".
        sp_size: Number of ranks that share each sequence by Ulysses sequence parallelism.
        sp_backend: Library for sequence parallelism: "deepspeed".
        tp_handler: Settings of tensor parallelism.
        cp_handler: Settings of context parallelism.
        sp_handler: Settings of sequence parallelism.
        ep_size: Number of ranks that share out the experts of a mixture by expert parallelism; they read different
            data, as those along dp_shard do. Not part of Accelerate.
        pp_size: Number of ranks that each hold some blocks of the model, as `PipelineKwargs` says; batches pass through
            them in parts. Not part of Accelerate.

    Raises:
        ConfigurationError: A size below 1, an unknown backend, a handler of another type, or axes that exclude one
            another.

    Examples:
        >>> ParallelismConfig(dp_shard_size=2, tp_size=4).total_size
        8
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: Literal["torch"] | None = None
    sp_size: int | None = None
    sp_backend: Literal["deepspeed"] | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    ep_size: int | None = None
    pp_size: int | None = None

    device_mesh: DeviceMesh | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Fill what is left open from the environment, make the handlers and check the layout."""
        fill(self, ParallelismOptions, *(f"{axis}_size" for axis in MESH_AXES), "cp_backend", "sp_backend")
        for axis, size in self.sizes.items():
            if size < 1:
                raise ConfigurationError(f"An axis of the mesh holds at least one rank; got {axis}_size={size}. Use 1.")
        if self.cp_enabled and self.sp_enabled:
            raise ConfigurationError(
                "Context and sequence parallelism both split the sequence and exclude each other; got "
                f"cp_size={self.cp_size} and sp_size={self.sp_size}. Set one of them to 1."
            )
        self._make_handlers()

    def _make_handlers(self) -> None:
        if self.tp_enabled and self.tp_handler is None:
            self.tp_handler = TorchTensorParallelConfig()
        if self.cp_enabled:
            self.cp_handler = self._handler("cp", self.cp_handler, TorchContextParallelConfig)
        if self.sp_enabled:
            self.sp_handler = self._handler("sp", self.sp_handler, DeepSpeedSequenceParallelConfig)
            length = self.sp_handler.sp_seq_length
            if not self.sp_handler.sp_seq_length_is_variable and length is not None and length % self.sizes["sp"]:
                raise ConfigurationError(
                    f"Ranks share a sequence in equal parts; got sp_seq_length={length} and sp_size={self.sp_size}. "
                    "Change one of them."
                )

    @staticmethod
    def _handler(axis: str, given: object, kind: type[_H]) -> _H:
        if given is None:
            return kind()
        expect(isinstance(given, kind), given, f"{axis}_handler has settings", f"Write {kind.__name__}(...).")
        return cast(_H, given)

    def __repr__(self) -> str:
        """Return the sizes, backends and handlers, one a line."""
        words = [f"\t{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.init]
        return "ParallelismConfig(\n" + ",\n".join([*words, f"\ttotal_size={self.total_size}"]) + ")"

    def to_json(self) -> dict[str, Any]:
        """Return everything configured, as JSON can hold it."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.init}
        return {
            name: _written(value) if name.endswith("_handler") and value is not None else value
            for name, value in values.items()
        }

    @property
    def sizes(self) -> dict[str, int]:
        """Number of ranks along each axis, outermost first."""
        return {axis: getattr(self, f"{axis}_size") for axis in MESH_AXES}

    @property
    def total_size(self) -> int:
        """Number of ranks on the whole mesh."""
        return math.prod(self.sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that read different data."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"] * self.sizes["ep"]

    @property
    def non_data_parallel_size(self) -> int:
        """Number of ranks that work on the same data together."""
        return self.total_size // self.data_parallel_size

    dp_replicate_enabled = Passed[bool](_several("dp_replicate"), "Whether the model is copied.")
    dp_shard_enabled = Passed[bool](_several("dp_shard"), "Whether a copy of the model is shared.")
    tp_enabled = Passed[bool](_several("tp"), "Whether matrix products are shared.")
    ep_enabled = Passed[bool](_several("ep"), "Whether ranks share out the experts of a mixture.")
    pp_enabled = Passed[bool](_several("pp"), "Whether ranks hold different blocks of the model.")
    cp_enabled = Passed[bool](_several("cp"), "Whether sequences are shared by context parallelism.")
    sp_enabled = Passed[bool](_several("sp"), "Whether sequences are shared by Ulysses sequence parallelism.")

    dp_dim_names = Passed[list[str]](_active(*GROUPS["dp"]), "Axes along which ranks read different data.")
    non_dp_dim_names = Passed[list[str]](_active(*_TOGETHER), "Axes along which ranks work on the same data.")
    dp_shard_cp_dim_names = Passed[list[str]](_active(*GROUPS["dp_shard_cp"]), "Axes that parameters are sharded over.")
    dp_cp_dim_names = Passed[list[str]](_active(*GROUPS["dp_cp"]), "Axes over which a loss is averaged.")
    active_mesh_dims = Passed[list[str]](
        _active(*GROUPS["dp"], *_TOGETHER), "Axes that hold more than one rank: those of the data first."
    )

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Axes of the mesh for FSDP: the axis of copies, then the flattened axis of shards.

        The flattened axis is named only where the mesh has it: where "dp_shard" or "cp" holds more than one rank.
        """
        return [*_active("dp_replicate")(self), *(["dp_shard_cp"] if self.dp_shard_cp_dim_names else [])]

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the active axes, outermost first, and their sizes; some libraries lay out the mesh from them."""
        axes = tuple(_active(*MESH_AXES)(self))
        return axes, tuple(self.sizes[axis] for axis in axes)

    def __getstate__(self) -> dict[str, Any]:
        # A mesh holds the process groups of this process; another one lays out its own.
        return {**self.__dict__, "device_mesh": None}

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Lay the ranks of the run out.

        Along with the active axes, the flattened axes "dp" (ranks with different data), "dp_shard_cp" (parameters are
        sharded over it) and "dp_cp" (a loss is averaged over it) can be had from the mesh by name. See
        `torch.distributed.device_mesh.init_device_mesh`.

        Args:
            device_type: Kind of device, for example "cuda" or "cpu".

        Returns:
            The mesh, torch's own; `None` where no axis is active, or where DeepSpeed lays out the ranks itself.
        """
        axes, sizes = self._get_mesh()
        if not axes or (self.sp_enabled and self.sp_backend == "deepspeed"):
            return None
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=axes)
        for name, over in GROUPS.items():
            members = _active(*over)(self)
            if members:
                mesh[members]._flatten(name)  # type: ignore[index]  # a list, as in Accelerate: callers record it
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return the mesh, which is laid out at the first call.

        Args:
            device_type: Kind of device; needed at the first call.

        Raises:
            ConfigurationError: No kind of device at the first call, or another one at a later call.
        """
        if self.device_mesh is None:
            if device_type is None:
                raise ConfigurationError(
                    "A mesh is laid out for one kind of device; got none. Pass device_type, for example 'cuda'."
                )
            self.device_mesh = self.build_device_mesh(device_type)
        elif device_type is not None and self.device_mesh.device_type != device_type:
            raise ConfigurationError(
                f"The mesh is already laid out for {self.device_mesh.device_type!r}; got device_type={device_type!r}. "
                "Make another ParallelismConfig for other devices."
            )
        return self.device_mesh
