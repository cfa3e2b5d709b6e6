"""What a token costs where experts come one by one."""

from torch import nn

from accel_core._records import record
from accel_core.modules.sizes import written_size

__all__ = ["ExpertShare", "choices_of"]


@record(frozen=True)
class ExpertShare:
    """What the experts of a plan cost.

    Attributes:
        budget: Bytes of the cache.
        dense: Bytes of everything else.
        nbytes: Bytes of all experts.
        count: How many there are.
        one: Bytes of the largest one.
        token: Bytes of those that work on a token; None where the model does not say how many these are.
    """

    budget: int
    dense: int
    nbytes: int
    count: int
    one: int
    token: int | None

    def explain(self) -> str:
        """Return in words what a token costs, in bytes that are brought."""
        held = min(self.budget / self.nbytes, 1)
        words = (
            f"{written_size(self.dense)} are dense; {self.count} experts of up to {written_size(self.one)} take "
            f"{written_size(self.nbytes)}, of which a cache of {written_size(self.budget)} holds {held:.0%}."
        )
        if self.token is None:
            return f"{words} The model does not say how many experts work on a token (num_experts_per_tok)."
        # Experts that are used alike are found as often as they are held; those of the last token cost nothing again.
        best = "nothing" if self.budget >= self.token else written_size(self.token - self.budget)
        return (
            f"{words} A token brings {written_size(self.token)} while the cache is empty, "
            f"{written_size(int((1 - held) * self.token))} once it is full if all experts are used alike, and {best} "
            "if the last token's serve again."
        )


def choices_of(model: nn.Module) -> int | None:
    """Return how many experts work on a token in each layer, as transformers' configurations say it."""
    config = getattr(model, "config", None)
    found = getattr(getattr(config, "text_config", config), "num_experts_per_tok", None)
    return found if isinstance(found, int) else None
