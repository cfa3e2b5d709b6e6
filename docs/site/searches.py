"""What readers search for, and the page that has to come first; `nox -s docs` fails where another one does.

The search of the site runs lunr in the browser; lunr's port to Python ranks the same index by the same rules.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lunr.builder import Builder
from lunr.stop_word_filter import stop_word_filter

FIRST = {
    "guides/how-do-i": (
        "FAQ", "NaN", "OOM", "EMA", "freeze", "early stopping", "validation", "seed", "seeds", "gradient checkpointing",
        "resume", "unused parameters",
    ),
    "guides/mixture-of-experts": ("MoE",),
    "guides/seventy-billion": ("70B",),
    "guides/exchange": ("gather metrics",),
    "guides/precision": ("mixed precision", "bf16"),
    "guides/big-models": ("offload",),
    "guides/lora-fsdp": ("LoRA",),
    "guides/trackers": ("wandb", "tensorboard"),
    "guides/clusters": ("SLURM", "Kubernetes"),
    "guides/debugging": ("hang",),
    "guides/continuing": ("checkpoint",),
    "guides/saving": ("save model",),
    "guides/inference": ("inference",),
    "guides/quantizing": ("quantize",),
    "guides/schedules": ("scheduler",),
    "guides/launching": ("launch",),
    "guides/profiling": ("profile",),
    "guides/deepspeed": ("DeepSpeed",),
    "installation": ("install",),
}  # fmt: skip


def problems(index: Path) -> list[str]:
    """Return a line for each search of `FIRST` that finds another page first."""
    builder = Builder()
    builder.pipeline.add(stop_word_filter)
    builder.ref("location")
    builder.field("title", boost=1000)  # as the theme has it
    builder.field("text")
    for page in json.loads(index.read_text())["docs"]:
        # Without brackets: the port takes some words of code for others, and fails on them.
        text = re.sub("<[^>]*>|[()]", " ", page["text"])
        builder.add({"location": page["location"], "title": page["title"], "text": text}, {"boost": page["boost"]})
    built = builder.build()
    asked = [(words, page, _first(built, words)) for page, searches in FIRST.items() for words in searches]
    return [f"a search for {words!r} finds {first} before {page}" for words, page, first in asked if first != page]


def _first(built: Any, words: str) -> str:
    def score(found: Any) -> float:
        terms = found["match_data"].metadata
        whole = all(any(term.startswith(word) for term in terms) for word in words.lower().split())
        weight = ("#" not in found["ref"]) + whole  # the theme prefers pages to their parts, and hits with all words
        return float(found["score"]) * (1 + weight**2)

    found = max(built.search(" ".join(f"{word}*" for word in words.split())), key=score)
    return str(found["ref"]).partition(".html")[0]
