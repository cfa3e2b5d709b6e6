"""What a token costs where experts come one by one."""

from collections.abc import Mapping

from torch import nn

from accel_bigmodel.device_map.experts import refuse_small_cache
from accel_core._records import record
from accel_core.modules.experts import number_of_experts
from accel_core.modules.sizes import convert_file_size_to_int, written_size


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

    @classmethod
    def of(
        cls, model: nn.Module, experts: Mapping[str, nn.Module], cache: int | str, sizes: Mapping[str, int]
    ) -> "ExpertShare":
        """Account for the experts of a model, whose modules' bytes are known; refuse a cache without room for one."""
        config = getattr(model, "config", None)
        choices = getattr(getattr(config, "text_config", config), "num_experts_per_tok", None)  # of transformers
        nbytes = {name: sizes.get(name, 0) for name in experts}
        counts = {name: int(number_of_experts(module)) for name, module in experts.items()}
        each = {name: nbytes[name] // counts[name] for name in experts}
        budget, one, whole = convert_file_size_to_int(cache), max(each.values()), sum(nbytes.values())
        refuse_small_cache(cache, budget, one)
        token = choices and sum(min(choices, counts[name]) * each[name] for name in experts)
        return cls(budget, sizes[""] - whole, whole, sum(counts.values()), one, token)

    def explain(self) -> str:
        """Return in words what a token costs, in bytes that are brought."""
        held = min(self.budget / self.nbytes, 1)
        words = (
            f"{written_size(self.dense)} are dense; {self.count} experts of up to {written_size(self.one)} take "
            f"{written_size(self.nbytes)}, of which a cache of {written_size(self.budget)} holds {held:.0%}."
        )
        if self.token is None:
            return f"{words} The model does not say how many experts work on a token (num_experts_per_tok)."
        return (
            f"{words} A token brings {written_size(self.token)} while the cache is empty, and "
            f"{written_size(int((1 - held) * self.token))} once it is full if all experts are used alike."
        )
