"""Names of the files and folders of a checkpoint.

The names of state and weight files are those that Accelerate documents, so folders can be exchanged with it.
"""

from __future__ import annotations

import functools
import os
import re
import string
from pathlib import Path

from accel_core.checkpoint.address import address_of
from accel_core.errors import expect
from accel_core.options.engines import PUBLIC, engines

MODEL_NAME = "pytorch_model"
FSDP_MODEL_NAME = f"{MODEL_NAME}_fsdp"
SAFE_MODEL_NAME = "model"
OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
DATALOADER_NAME = "dl_state_dict"
RNG_STATE_NAME = "random_states"
CUSTOM_NAME = "custom_checkpoint"
SCALER_NAME = "scaler.pt"
WEIGHTS_NAME = f"{MODEL_NAME}.bin"
WEIGHTS_PATTERN_NAME = "pytorch_model{suffix}.bin"
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_NAME = f"{SAFE_MODEL_NAME}.safetensors"
SAFE_WEIGHTS_PATTERN_NAME = "model{suffix}.safetensors"
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"
PROGRESS_NAME = "accel_progress.json"
MANIFEST_NAME = "accel_manifest.json"
PARTS_NAME = "accel_parts.json"
LISTS_NAME = "accel_manifest"

HIDDEN = ".accel-"
"""How the names begin of what a save needs inside a target until its files are in place."""

ID_LENGTH = 12
"""Letters of the id of a save."""

NUMBERED = re.compile(r"checkpoint_(0|[1-9][0-9]*)")
"""Names of checkpoints in a series."""

_MODELS = re.compile(r"model(_\d+)?\.safetensors|pytorch_model(_\d+)?\.bin")
_PARTS = re.compile(
    rf"({_MODELS.pattern}|optimizer(_\d+)?\.bin|scheduler(_\d+)?\.bin"
    r"|sampler(_\d+)?\.bin|dl_state_dict(_\d+)?\.bin|scaler\.pt|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl"
    r"|accel_progress\.json|accel_parts\.json|accel_manifest\.json)"
)
_LISTS = re.compile(rf"{LISTS_NAME}/(\d+)\.json")
_SHARDS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


def model_name(index: int, *, safe: bool) -> str:
    """Return the file of the model number `index`.

    >>> model_name(0, safe=True), model_name(1, safe=False)
    ('model.safetensors', 'pytorch_model_1.bin')
    """
    return numbered(SAFE_MODEL_NAME, index, "safetensors") if safe else numbered(MODEL_NAME, index)


def numbered(stem: str, index: int, suffix: str = "bin") -> str:
    """Return the file number `index` of a kind: of optimizers, say, `numbered(OPTIMIZER_NAME, 1)`."""
    return f"{stem}.{suffix}" if index == 0 else f"{stem}_{index}.{suffix}"


def sharded(stem: str, index: int) -> str:
    """Return the folder of the shards number `index` of a kind."""
    return f"{stem}_{index}"


def local_model_name(index: int, rank: int) -> str:
    """Return the file of what one rank holds of the model number `index`.

    >>> local_model_name(0, 1), local_model_name(2, 0)
    ('pytorch_model_fsdp_rank1.bin', 'pytorch_model_fsdp_2_rank0.bin')
    """
    return f"{FSDP_MODEL_NAME}{f'_{index}' if index else ''}_rank{rank}.bin"


def random_states_name(rank: int) -> str:
    """Return the file of the random states of a rank."""
    return f"{RNG_STATE_NAME}_{rank}.pkl"


def custom_name(index: int) -> str:
    """Return the file of the registered object number `index`."""
    return f"{CUSTOM_NAME}_{index}.pkl"


def list_name(rank: int) -> str:
    """Return the list of the files that a rank wrote, where the manifest of many ranks leaves that to them."""
    return f"{LISTS_NAME}/{rank}.json"


def listing_rank(name: str) -> int | None:
    """Return the rank whose list a file is; `None` for other files."""
    found = _LISTS.fullmatch(name)
    return int(found[1]) if found else None


def is_model(name: str) -> bool:
    """Return whether `name` is a file of whole weights that `save_state` writes."""
    return _MODELS.fullmatch(name) is not None


def folder_of(given: str | os.PathLike[str]) -> Path:
    """Return the folder that a user named, or the address in a store."""
    fits = isinstance(given, str | os.PathLike)
    expect(fits, given, "A checkpoint is a folder", "Pass its path as a text or a Path.")
    return address_of(os.fspath(given)) or Path(os.path.expanduser(given))


def engine_of(name: str) -> str | None:
    """Return the engine that writes files of this name; `None` for a name that no engine owns.

    >>> engine_of("pytorch_model_fsdp_0/__0_0.distcp"), engine_of("optimizer.bin")
    ('FSDP', None)
    """
    return next((title for title, own, also in _engines() if own.fullmatch(name) or also.fullmatch(name)), None)


@functools.cache
def _engines() -> list[tuple[str, re.Pattern[str], re.Pattern[str]]]:
    """Return each engine with the names that only it writes, and those that are its own beside such names."""
    rows = [(engine.title, engine.files, "") for engine in engines().values()]
    rows += [(known.title, known.files, known.aliases) for known in PUBLIC]
    return [(title, re.compile(own), re.compile(also)) for title, own, also in rows if own]


def found_in(folder: Path) -> list[str]:
    """Return the files of a folder with documented names, including those in the folders of engines, sorted."""
    entries = list(os.scandir(folder))
    files = [entry.name for entry in entries if not entry.is_dir()]
    listed = [name for name in files if _PARTS.fullmatch(name) or engine_of(name)]
    # Any other folder may be of any size, and is not looked into.
    shards = [each for each in entries if each.name.startswith((MODEL_NAME, OPTIMIZER_NAME, LISTS_NAME))]
    folders = [place for place in shards if place.is_dir(follow_symlinks=False)]
    inside = [f"{place.name}/{name}" for place in folders for name in os.listdir(place)]
    inside = [name for name in inside if engine_of(name) or _LISTS.fullmatch(name)]
    known = {engine_of(name) for name in inside}
    unsure = [also for title, _, also in _engines() if title not in known]  # `latest`, for instance, may be anybody's
    return sorted([*inside, *(name for name in listed if not any(also.fullmatch(name) for also in unsure))])


def is_shard(name: str) -> bool:
    """Return whether `name` is a file that `save_model` writes: weights, a shard of them, or their index.

    >>> is_shard("model-00001-of-00003.safetensors"), is_shard("model_1.safetensors")
    (True, False)
    """
    return _SHARDS.fullmatch(name) is not None


def fresh_id() -> str:
    """Return an id for one save."""
    return id_of(os.urandom(ID_LENGTH))


def id_of(digest: bytes) -> str:
    """Return an id that stands for a digest: letters only, because readers of folder names look for numbers."""
    return "".join(string.ascii_lowercase[byte % 26] for byte in digest[:ID_LENGTH])
