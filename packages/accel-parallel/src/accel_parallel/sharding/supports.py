"""What a model may have, or do, where ranks share its parameters: the table that the documentation shows."""

from __future__ import annotations

ENGINES = ("FSDP1", "FSDP2", "tensor parallel")

ABILITIES = {
    "weights of two dtypes in one block, all of which train": (False, False, True),
    "the same, where those of the second dtype are frozen": (False, True, True),
    "hooks on a parameter that `prepare` shards or splits": (False, False, False),
    "a method other than `forward` that calls layers, `model.encode(x)`, trained through": (False, True, True),
    "a method that is given a tensor and reads a parameter of the model itself": (False, True, True),
    "`resize_token_embeddings` after `prepare`": (False, False, False),
}
"""Whether each trains as in one process under each of `ENGINES`; what does not is refused by one of accel's errors.
`tests/ranks/test_sharded_methods.py` measures every entry."""
