"""What values are allowed: one check for values of flags, variables, files, `--set` and answers."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """What the value of a setting has to be."""

    wanted: str
    holds: Callable[[Any], bool]
    parse: Callable[[str], Any] = str


_GPU = re.compile(r"\d+|(?:GPU|MIG)-[\w/-]+", re.ASCII)
_SBATCH = re.compile(r"[a-z][a-z-]*(?:=[^\x00-\x1f\x7f]+)?", re.ASCII)
_TEE = re.compile(r"[0-3]|\d+:[0-3](?:,\d+:[0-3])*", re.ASCII)


def _gpus(value: Any) -> bool:
    ids = [word.strip() for word in str(value).split(",")]
    return value == "all" or (len(set(ids)) == len(ids) and all(_GPU.fullmatch(word) for word in ids))


def _machines(value: Any) -> bool:
    low, _, high = str(value).partition(":")
    return bool(re.fullmatch(r"\d+(?::\d+)?", str(value), re.ASCII)) and 1 <= int(low) <= int(high or low)


def _pairs(value: Any) -> bool:
    pairs = [part.partition("=") for part in str(value).split(",") if part.strip()]
    return all(name.strip() and equals for name, equals, _ in pairs)


COUNT = Rule("a whole number from 1", lambda value: value >= 1, int)
FROM_ZERO = Rule("a whole number from 0", lambda value: value >= 0, int)
PORT = Rule("a port from 0 to 65535", lambda value: 0 <= value <= 65535, int)
SECONDS = Rule("seconds above 0", lambda value: value > 0, float)
GPUS = Rule("`all`, or comma-separated numbers from 0, each once", _gpus)
MACHINES = Rule("a whole number from 1, or MIN:MAX as in 1:2", _machines)
PAIRS = Rule("comma-separated KEY=VALUE pairs", _pairs)
SBATCH = Rule(
    "KEY=VALUE in one line, as in partition=gpu, or KEY alone, as in exclusive",
    lambda values: all(_SBATCH.fullmatch(pair) for pair in values),
)
FIELDS = Rule("KEY=VALUE, as in working_dir=.", lambda values: all(re.fullmatch("[^=]+=.+", pair) for pair in values))
TEE = Rule(
    "0, 1, 2 or 3, or a number for each local rank as in 0:3,1:2", lambda value: bool(_TEE.fullmatch(str(value)))
)


def tee_of(value: str, local_rank: int) -> int:
    """Read `--tee`: 0 nothing, 1 output, 2 errors, 3 both; or comma-separated RANK:N."""
    if ":" not in value:
        return int(value)
    parts = [part.partition(":") for part in value.split(",")]
    return {int(rank): int(number) for rank, _, number in parts}.get(local_rank, 0)
