"""Divide prompts among processes, let each answer its part, and collect the answers in order.

    accel launch --cpu --num-processes 2 examples/gallery/language_model.py
    accel launch --cpu --num-processes 2 examples/gallery/distributed_inference.py

Shows `split_between_processes`, which needs no loader, and `gather_object`. Uses the language model that the first
command trains.
"""

import time
from pathlib import Path

from safetensors.torch import load_file

from accel import Accelerator
from accel_core.comm.objects import gather_object
from corpus import Transformer, write_on
from report import finish, folder

PROMPTS = ["The ", "A class ", "An object ", "If the ", "The value ", "This is ", "When a "]


def main() -> None:
    """Answer every prompt once."""
    target = folder(__doc__, "distributed_inference")
    accelerator = Accelerator()
    model = Transformer()
    model.load_state_dict(load_file(Path(target).parent / "language_model" / "model.safetensors"))
    model.to(accelerator.device).eval()

    answers, seconds = [], []
    with accelerator.split_between_processes(PROMPTS) as mine:  # the first process gets the one that is left over
        for prompt in mine:
            begun = time.perf_counter()
            answers.append(write_on(model, prompt, 30).replace("\n", " "))
            seconds.append(time.perf_counter() - begun)
    everything = gather_object(answers)
    shares = gather_object([len(mine)])
    times = gather_object(seconds)

    assert [text[: len(prompt)] for text, prompt in zip(everything, PROMPTS, strict=True)] == PROMPTS, "in order"
    rows = {"processes": accelerator.num_processes, "prompts of each": ", ".join(map(str, shares))}
    rows |= {f"answer {number}": repr(text) for number, text in enumerate(everything, 1)}
    curve = {"x": range(1, len(times) + 1), "seconds for each prompt": times}
    finish(accelerator, target, "Distributed inference", rows, curve)


if __name__ == "__main__":
    main()
