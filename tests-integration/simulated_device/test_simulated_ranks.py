"""The benchmark of what grows with the ranks, on few of them: it counts, draws, and steps send no control message."""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from accel_testing import limits

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scale.py"


@pytest.mark.full("a benchmark")
def test_training_steps_send_nothing_but_gradients(tmp_path: Path) -> None:
    """Whatever the number of ranks, 20 steps make DistributedDataParallel's reductions and no other message.

    Of more than 64, no rank receives more for more ranks at a barrier or in a save; what main learns of shards grows.
    """
    drawing = tmp_path / "scale.svg"
    arguments = ("--ranks", "4", "16", "80", "160", "--files", "10", "100", "--turns", "1", "--svg", str(drawing))
    done = limits.run([sys.executable, str(SCRIPT), *arguments], check=True, quiet=60)
    lines = [cells for line in done.stdout.splitlines() if len(cells := line.strip("| ").split(" | ")) > 2]
    rows = {cells[0]: cells[1:] for cells in lines}
    received = [cells[1:] for cells in lines if cells[0] == "… this rank receives"]
    assert len(received) == 5, "of gather, barrier, save, load, and save of shards"
    assert all(cells[2] == cells[3] for cells in received[1:3])
    assert all(float(cells[3].removesuffix(" KiB")) <= 64 for cells in received[2:])
    assert rows["rank 0 of"][:2] == ["4", "16"]
    assert rows["control messages in 20 steps"][:2] == ["0", "0"]
    assert rows["… more than under plain DistributedDataParallel"][:2] == ["0", "0"]
    few, many = (int(cell) for cell in rows["reductions in 20 steps"][:2])
    assert few == many >= 20
    assert len(set(rows["… through the store"][:4])) == 1, "a rank cleans up for each of the others"
    panels = ElementTree.parse(drawing).getroot().findall("{http://www.w3.org/2000/svg}g")
    assert len(panels) == 4
    assert all(panel.findall("{http://www.w3.org/2000/svg}circle") for panel in panels)
