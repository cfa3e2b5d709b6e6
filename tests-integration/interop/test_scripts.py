"""Scripts that diffusers publishes train on the drop-in as on Accelerate 1.15.0, and go on from their checkpoints."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

OWN_FILES = {"accel_manifest.json", "accel_progress.json", "sampler.bin"}


@pytest.fixture(scope="module")
def unconditional(request: pytest.FixtureRequest, compare: Callable[..., Any]) -> Any:
    """Return what two epochs, and two more from the checkpoint in the second one, left on one process and two ranks."""
    if not Path(os.environ.get("ACCEL_SCRIPTS", ""), "train_unconditional.py").is_file():
        pytest.skip("ACCEL_SCRIPTS names no folder with train_unconditional.py; no package of PyPI has it")
    if find_spec("torchvision") is None:
        pytest.skip("the script needs torchvision, of which no release fits the torch of this environment")
    return compare("unconditional", request.param, ("make", "train", "resume"))


@pytest.mark.parametrize("unconditional", [1], indirect=True)
@pytest.mark.parametrize("what", ["loss", "lr", "step", "weights"])
def test_steps_and_weights_are_bit_equal(unconditional: Any, what: str) -> None:
    """Both runs logged as many steps, with the same losses and rates, and end with the same weights in every file."""
    assert unconditional.ours[what] == unconditional.theirs[what]
    assert unconditional.ours[what]


@pytest.mark.parametrize("unconditional", [2], indirect=True)
def test_two_ranks_take_the_same_steps(unconditional: Any) -> None:
    """Steps and rates are equal, and losses up to the load: rank 0 saved alone, so rank 1 draws anew after it."""
    ours, theirs = unconditional.ours, unconditional.theirs
    assert (ours["step"], ours["lr"]) == (theirs["step"], theirs["lr"])
    steps = ours["step"]
    until = next(number for number in range(1, len(steps)) if steps[number] <= steps[number - 1])
    assert ours["loss"][:until] == theirs["loss"][:until]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.01)


@pytest.mark.parametrize("unconditional", [1, 2], indirect=True)
def test_files_are_those_of_the_original(unconditional: Any) -> None:
    """The same checkpoints are kept, with the same files; what accel adds to them has names of its own."""
    own = {name for name in unconditional.ours["files"] if Path(name).name not in OWN_FILES}
    assert own == {name for name in unconditional.theirs["files"] if Path(name).name not in OWN_FILES}
    assert any(name.startswith("checkpoint-") for name in own)
