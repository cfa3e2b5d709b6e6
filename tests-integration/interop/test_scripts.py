"""Scripts that diffusers and transformers publish train on the drop-in as on Accelerate 1.15.0, and go on likewise."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OWN_FILES = {"accel_config.json", "accel_manifest.json", "accel_progress.json", "sampler.bin", "sampler_1.bin"}
SAVED_BY_MAIN = ("train_unconditional", "train_text_to_image", "textual_inversion")
SAVED_BY_ALL = ("run_glue_no_trainer", "run_ner_no_trainer")
SCRIPTS = (*SAVED_BY_MAIN, *SAVED_BY_ALL)


def run(compare: Callable[..., Any], name: str, ranks: int, *phases: str) -> Any:
    """Return what phases of a script left on both sides, on one process or two ranks."""
    if not any(Path(os.environ.get("ACCEL_SCRIPTS", os.devnull)).rglob(f"{name}.py")):
        pytest.skip(f"ACCEL_SCRIPTS names no folder with {name}.py; no package of PyPI has it")
    pair = compare("scripts", ranks, tuple(f"{name} {phase}" for phase in ("make", *phases)))
    if "unfit" in pair.theirs:
        pytest.skip(f"not for the libraries of this environment: {pair.theirs['unfit']}")
    return pair


@pytest.fixture
def scripts(request: pytest.FixtureRequest, compare: Callable[..., Any]) -> Any:
    """Return what a run, and one that goes on from its checkpoint, left."""
    return run(compare, *request.param, "train", "resume")


def over(names: tuple[str, ...], *ranks: int) -> pytest.MarkDecorator:
    """Return the mark that runs a test over scripts and numbers of processes."""
    cases = [pytest.param((name, number), id=f"{name}-{number}") for name in names for number in ranks]
    return pytest.mark.parametrize("scripts", cases, indirect=True)


@over(SCRIPTS, 1)
@pytest.mark.parametrize("what", ["scalars", "weights", "results"])
def test_one_process_is_bit_equal(scripts: Any, what: str) -> None:
    """Both runs logged the same numbers at the same steps, and end with the same weights in every file."""
    assert scripts.ours[what] == scripts.theirs[what]
    assert scripts.ours["scalars"]
    assert scripts.ours["weights"]


def test_reading_ahead_is_what_differs(compare: Callable[..., Any]) -> None:
    """Without a worker, pictures and noise share a generator: numbers are equal only where ours reads ahead too."""
    pair = run(compare, "textual_inversion", 1, "alone", "ahead")
    name = "logs/textual_inversion loss"
    ours, theirs = ([value for _, value in side[name]] for side in (pair.ours["scalars"], pair.theirs["scalars"]))
    half = len(theirs) // 2
    assert half
    assert theirs[:half] == theirs[half:] == ours[half:]
    assert all(mine != other for mine, other in zip(ours[:half], theirs, strict=False))


def until_the_load(rows: list[list[float]]) -> int:
    """Return how many numbers the first run logged: the second one begins at a step before the last one."""
    steps = [step for step, _ in rows]
    return next((number for number in range(1, len(steps)) if steps[number] < steps[number - 1]), len(steps))


@over(SAVED_BY_MAIN, 2)
def test_saved_by_the_main_rank(scripts: Any) -> None:
    """Steps are equal, and numbers up to the load: rank 0 saved alone, so rank 1 draws anew after it."""
    assert scripts.ours["scalars"].keys() == scripts.theirs["scalars"].keys()
    for name, ours in scripts.ours["scalars"].items():
        theirs = scripts.theirs["scalars"][name]
        assert [step for step, _ in ours] == [step for step, _ in theirs]
        first = until_the_load(ours)
        assert ours[:first] == theirs[:first]
        assert [value for _, value in ours] == pytest.approx([value for _, value in theirs], rel=0.1)


@over(SAVED_BY_ALL, 2)
@pytest.mark.parametrize("what", ["weights", "results"])
def test_saved_by_all_ranks(scripts: Any, what: str) -> None:
    """Both runs end with the same weights in every checkpoint, and the same results."""
    assert scripts.ours[what] == scripts.theirs[what]
    assert scripts.ours[what]


@over(SCRIPTS, 1, 2)
def test_files_are_those_of_the_original(scripts: Any) -> None:
    """The same checkpoints are kept, with the same files; what accel adds to them has names of its own."""
    own = {name for name in scripts.ours["files"] if Path(name).name not in OWN_FILES}
    assert own == {name for name in scripts.theirs["files"] if Path(name).name not in OWN_FILES}
    assert any(name.startswith(("checkpoint-", "step_")) for name in own)
