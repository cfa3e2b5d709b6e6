"""Norm layers for sequence parallelism, where neither Transformer Engine nor Apex provides them."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accel_megatron import library


@contextmanager
def shared_sequences(arguments: Namespace) -> Iterator[None]:
    """Let megatron-core build torch's norms under sequence parallelism, which it refuses to do by itself.

    Each rank normalizes its own tokens. The gradients of a norm's weights are therefore summed over ranks, which
    megatron-core does for all weights that are marked for it.
    """
    if not arguments.sequence_parallel:
        yield
        return
    kind = library.core("transformer.torch_norm").WrappedTorchNorm
    own = kind.__new__

    def make(cls: object, config: Any, *args: object, **kwargs: object) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        made = own(cls, plain, *args, **kwargs)
        for parameter in made.parameters():
            parameter.sequence_parallel = True
        return made

    kind.__new__ = make
    try:
        yield
    finally:
        kind.__new__ = own
