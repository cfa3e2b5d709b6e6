"""How many samples one optimizer step sees, as far as it can be known before the script runs."""

from dataclasses import dataclass

from accel_core.options.engines import load
from accel_launch.settings.child import switched
from accel_launch.settings.mesh import mesh_of
from accel_launch.settings.resolve import Settings


@dataclass(frozen=True)
class StepBatch:
    """Samples of one optimizer step and of one process at a time, and batches added up; None as the script decides."""

    samples: int | None
    per_process: int | None
    accumulated: int | None
    data_parallel: int

    def __str__(self) -> str:
        """Return one sentence."""
        ranks = f"{self.data_parallel} data-parallel process{'es' if self.data_parallel > 1 else ''}"
        if self.samples is not None:
            return f"One optimizer step sees {self.samples} samples, on {ranks}."
        added = f"{self.accumulated} accumulated" if self.accumulated else "what the script accumulates"
        return f"One optimizer step sees: unknown, the script decides the batch per process; x {ranks} x {added}."


def batch_of(settings: Settings) -> StepBatch:
    """Return what the settings say about the batch of one optimizer step."""
    ranks = mesh_of(settings).data_parallel
    batches = [load(engine.batch)(settings) for engine in switched(settings) if engine.batch]
    total, each, steps = batches[0] if batches else (None, None, _accumulated(settings))
    if total is None and each is not None and steps is not None:
        total = each * steps * ranks
    return StepBatch(total, each, steps, ranks)


def _accumulated(settings: Settings) -> int | None:
    text = settings.inherited.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
    return int(text) if text.isdecimal() else None
