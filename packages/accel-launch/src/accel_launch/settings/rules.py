"""What values are allowed: one check for what a flag, a variable, a file, `--set` or an answer says."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["COUNT", "FROM_ZERO", "GPUS", "MACHINES", "PAIRS", "PORT", "SECONDS", "TEE", "Rule", "tee_of"]


@dataclass(frozen=True)
class Rule:
    """What the value of a setting has to be."""

    wanted: str
    holds: Callable[[Any], bool]


_GPU = re.compile(r"\d+|(?:GPU|MIG)-[\w/-]+", re.ASCII)
_TEE = re.compile(r"[0-3]|\d+:[0-3](?:,\d+:[0-3])*", re.ASCII)


def _gpus(said: Any) -> bool:
    ids = [word.strip() for word in str(said).split(",")]
    return said == "all" or (len(set(ids)) == len(ids) and all(_GPU.fullmatch(word) for word in ids))


def _machines(said: Any) -> bool:
    low, _, high = str(said).partition(":")
    return bool(re.fullmatch(r"\d+(?::\d+)?", str(said), re.ASCII)) and 1 <= int(low) <= int(high or low)


def _pairs(said: Any) -> bool:
    pairs = [part.partition("=") for part in str(said).split(",") if part.strip()]
    return all(name.strip() and equals for name, equals, _ in pairs)


COUNT = Rule("a whole number from 1", lambda said: said >= 1)
FROM_ZERO = Rule("a whole number from 0", lambda said: said >= 0)
PORT = Rule("a port from 0 to 65535", lambda said: 0 <= said <= 65535)
SECONDS = Rule("seconds above 0", lambda said: said > 0)
GPUS = Rule("`all`, or comma-separated numbers from 0, each once", _gpus)
MACHINES = Rule("a whole number from 1, or MIN:MAX as in 1:2", _machines)
PAIRS = Rule("comma-separated KEY=VALUE pairs", _pairs)
TEE = Rule("0, 1, 2 or 3, or a number for each local rank as in 0:3,1:2", lambda said: bool(_TEE.fullmatch(str(said))))


def tee_of(said: str, local_rank: int) -> int:
    """Read `--tee`: 0 nothing, 1 output, 2 errors, 3 both; or comma-separated RANK:N."""
    if ":" not in said:
        return int(said)
    parts = [part.partition(":") for part in said.split(",")]
    return {int(rank): int(number) for rank, _, number in parts}.get(local_rank, 0)
