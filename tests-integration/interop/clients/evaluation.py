"""An evaluation loop as lm-eval writes it."""

from typing import Any

import torch
from models import llama, report, sequences

from accelerate import Accelerator, find_executable_batch_size
from accelerate.utils import gather_object


def _likelihoods() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(llama(), evaluation_mode=True).eval()
    rows = sequences(9)
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=8)  # type: ignore[untyped-decorator]
    def score(batch_size: int) -> list[float]:
        tried.append(batch_size)
        if batch_size > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        scores: list[float] = []
        for start in range(0, len(rows), batch_size):
            tokens = torch.stack([row["input_ids"] for row in rows[start : start + batch_size]])
            with torch.no_grad():
                logits = model(input_ids=tokens).logits.log_softmax(-1)
            picked = logits[:, :-1].gather(-1, tokens[:, 1:, None]).sum((1, 2))
            scores += picked.tolist()
        return scores

    found = gather_object([(index, value) for index, value in enumerate(score())])
    return {"scores": [value for _, value in sorted(found)], "tried": tried}


if __name__ == "__main__":
    report({"likelihoods": _likelihoods()})
