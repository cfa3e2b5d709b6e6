"""The file through which a rank tells the launcher of its run."""

import time
from collections.abc import Iterator
from pathlib import Path

from accel_core.host.run_card import VARIABLE, CardReader, RunCard


def test_what_was_written_is_read() -> None:
    """Epochs of the loader that took longest add up; the last checkpoint counts."""
    reader = CardReader()
    card = RunCard(reader.variables()[VARIABLE])
    training, testing = object(), object()
    card.epoch(training, 100, 4.0)
    card.epoch(testing, 1000, 1.0)
    card.epoch(training, 60, 4.0)
    for folder in ("state/long/name", "last"):
        card.checkpoint(folder)
    facts = reader.close()
    assert {name: facts[name] for name in ("samples", "seconds", "checkpoint")} == {
        "samples": 160, "seconds": 8.0, "checkpoint": "last",
    }  # fmt: skip


def test_the_wait_for_batches_is_that_of_the_loader_trained_with() -> None:
    """Time in the loader counts, time in the script between two batches does not, and nor does another loader's."""
    reader = CardReader()
    card = RunCard(reader.variables()[VARIABLE])
    training, testing = object(), object()

    def slow() -> Iterator[int]:
        for batch in range(3):
            time.sleep(0.02)
            yield batch

    began = time.perf_counter()
    given = []
    for batch in card.timed(training, slow()):
        given.append(batch)
        time.sleep(0.04)
    seconds = time.perf_counter() - began
    assert list(card.timed(testing, slow())) == given == [0, 1, 2]
    card.epoch(testing, 3, 0.0)
    card.epoch(training, 3, seconds)
    assert 0.06 <= reader.close()["waited"] <= seconds - 0.12


def test_nothing_is_written_where_nobody_reads(tmp_path: Path) -> None:
    """Without a launcher, or where the path leads to another file, nothing happens to it."""
    assert not RunCard(None).wanted
    assert CardReader().close() == {}
    stranger = tmp_path / "stranger"
    stranger.write_text("mine")
    RunCard(str(stranger)).checkpoint("x")
    assert stranger.read_text() == "mine"
