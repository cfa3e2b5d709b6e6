"""The flags of `accel launch` for each layout to verify."""

from __future__ import annotations

from dataclasses import dataclass

from accel_core.errors import ConfigurationError
from accel_core.mesh.spec import parse_layout, parse_layouts


@dataclass(frozen=True)
class RequestedLayout:
    """A layout that was named."""

    name: str
    ranks: int
    parts: int
    words: tuple[str, ...]


def requested_layouts(text: str) -> list[RequestedLayout]:
    """Read a comma-separated list of layouts."""
    return [requested_layout(spec.name) for spec in parse_layouts(text)]


def requested_layout(text: str) -> RequestedLayout:
    """Return the layout of a name, which has several processes."""
    spec = parse_layout(text)
    if spec.ranks < 2:
        raise ConfigurationError(
            f"A layout to compare with one process needs at least 2 ranks; got {spec.name!r}. Write for example dp2 "
            "or fsdp2xtp2."
        )
    words = ["--num-processes", str(spec.ranks)]
    if spec.zero_stage is not None:
        words += ["--use-deepspeed", "--zero-stage", str(spec.zero_stage), "--zero3-save-16bit-model", "true"]
    elif spec.engine == "fsdp" or min(spec.size("cp"), spec.size("tp")) > 1:
        words += ["--use-fsdp", "--fsdp-version", "2"]
    shared = [(axis, size) for axis, size in spec.sizes if size > 1]
    if any(axis not in ("dp_replicate", "dp_shard") for axis, _ in shared) or len(shared) > 1:
        words += ["--use-parallelism-config"]
        for axis, size in shared:
            words += [f"--parallelism-config-{axis.replace('_', '-')}-size", str(size)]
    if spec.size("sp") > 1:
        words += ["--parallelism-config-sp-backend", "deepspeed"]
    return RequestedLayout(spec.name, spec.ranks, spec.layout().replicas, tuple(words))
