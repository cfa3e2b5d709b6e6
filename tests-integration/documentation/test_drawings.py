"""Plots and diagrams of the site show what tables and texts say, and refuse what they cannot show."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs" / "site"))
import diagrams
import plots

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "RESULTS.md"


def words(svg: str) -> list[str]:
    """Return the texts of a drawing."""
    return [node.text or "" for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_every_plot_is_below_its_table() -> None:
    """Each section with a plot has one, and each number beside a bar is one of the table above it."""
    page = plots.added(RESULTS.read_text())
    for subject in plots.PLOTS:
        table, svg = re.search(
            rf"<!-- {subject} -->(.*?)<!-- end of {subject} -->\s*<div[^>]*>\s*(<svg.*?</svg>)", page, re.DOTALL
        ).groups()
        shown = [float(word.replace(",", "")) for word in words(svg) if re.fullmatch(r"[\d,.]+", word)]
        known = [plots.value_of(cell) for row in plots.table(table) for cell in row]
        assert shown, subject
        assert set(shown) <= set(known), subject


def test_a_table_that_has_changed_is_refused() -> None:
    """A column or rows that are gone end the build instead of leaving an empty plot."""
    section = "<!-- step -->\n| library | a, µs |\n|---|---|\n| accel | 1 |\n<!-- end of step -->\n"
    with pytest.raises(ValueError, match=r"no column 'added per step, µs'; got \['library', 'a, µs'\]"):
        plots.added(section)
    with pytest.raises(ValueError, match="shows nothing"):
        plots.added(section.replace("a, µs", "added per step, µs").replace("| 1 |", "| not measured |"))


@pytest.mark.parametrize(
    ("cell", "value"),
    [("1,027 ms (8.70 ×)", 1027), ("5.00 s", 5000), ("6 µs", 0.006), ("+0.87", 0.87), ("raises", None), ("–", None)],
)
def test_cells_are_numbers(cell: str, value: float | None) -> None:
    """Times are in ms, signs and thousands are read, and words are no number."""
    assert plots.value_of(cell) == value


@pytest.mark.parametrize("name", sorted(path.stem for path in diagrams.FOLDER.glob("*.txt")))
def test_every_text_is_a_diagram(name: str) -> None:
    """Every line of text is in the drawing, and there is an arrow for each."""
    source = (diagrams.FOLDER / f"{name}.txt").read_text()
    svg = diagrams.from_text(name)
    assert svg.count("<line") == len(re.findall("^\\w+ -> ", source, re.MULTILINE))
    assert all(word in source for word in words(svg))


def test_packages_stand_above_what_they_need() -> None:
    """An arrow leads to each direct need, none to what others bring along, and lower packages stand lower."""
    svg = diagrams.packages({"core": set(), "big": {"core"}, "quant": {"core", "big"}, "all": {"core", "big", "quant"}})
    heights = {
        node.text: float(node.get("y")) for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    }
    assert heights["all"] < heights["quant"] < heights["big"] < heights["core"]
    assert svg.count("<line") == 3


def test_what_a_step_holds_is_drawn_one_upon_the_other() -> None:
    """Every kind of bytes has a name and an area, and each area begins where the one below ends."""
    svg = diagrams.memory()
    assert set(words(svg)) >= {*diagrams.HELD, *diagrams.STEP}
    areas = [
        [tuple(map(float, pair.split(","))) for pair in node.get("points").split()]
        for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}polygon")
    ]
    assert len(areas) == len(diagrams.HELD)
    for lower, upper in pairwise(areas):
        assert lower[: len(lower) // 2] == upper[len(upper) // 2 :][::-1]


@pytest.mark.parametrize(
    ("source", "told"),
    [("a: one\na -> b", r"no box; got \['b'\]"), ("only words", "is a row or an arrow; got 'only words'")],
)
def test_a_text_that_is_no_diagram(source: str, told: str) -> None:
    """An arrow to nothing and a line that is neither row nor arrow are refused."""
    with pytest.raises(ValueError, match=told):
        diagrams.of(source)


def test_the_memory_of_training_is_drawn_as_the_page_says() -> None:
    """Each line of the table in the page about meshes has a bar, with its ranks and its peak."""
    guides = RESULTS.parents[1] / "docs" / "guides"
    drawn = words((guides / "parallelism.svg").read_text())
    page = (guides / "parallelism.md").read_text()
    lines = re.findall(r"^([fh]sdp.+?)  +(\d+)  .*?([\d.]+ GiB) +(?:yes|no)$", page, re.MULTILINE)
    assert len(lines) == 10
    for layout, ranks, peak in lines:
        assert f"{layout}: {peak} on each rank of {ranks}" in drawn
