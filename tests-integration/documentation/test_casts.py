"""Terminal casts: what a program prints is what is drawn, and every cast is recorded and shown."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs" / "site"))
import casts
import terminal

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", casts.CASTS)
def test_a_cast_is_recorded_and_shown(name: str) -> None:
    """The drawing has the command lines as they are now, a page shows it, and no folder of a machine is in it."""
    text = (ROOT / "docs" / "casts" / f"{name}.svg").read_text()
    lines = ["".join(line.itertext()) for line in ElementTree.fromstring(text).iter(f"{SVG}text")]
    for command in casts.CASTS[name].commands:
        assert f"$ {command}" in lines, "record it again: nox -s casts"
    assert any(f"casts/{name}.svg" in page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert not re.search(r"/(home|root|Users|work)/", text)


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("one\r\ntwo\r\n", "one\ntwo"),
        ("reading 1\rreading 2", "reading 2"),
        ("longer\r\x1b[Kshort", "short"),
        ("question\r\n> a\r\n> b\x1b[1A\r\x1b[Jchosen", "question\nchosen"),
        ("ab\b\bcd", "cd"),
        ("\x1b[1;32mgreen\x1b[0m plain", "green plain"),
        ("x" * (terminal.COLUMNS + 2), "x" * terminal.COLUMNS + "\nxx"),
    ],
)
def test_a_screen_obeys(printed: str, shown: str) -> None:
    """Returns, rewritten lines, moves of the cursor and colors leave on the screen what a terminal shows."""
    screen = terminal.Screen()
    screen.feed(printed, 0.0)
    assert screen.text == shown


def test_lines_appear_in_their_order() -> None:
    """A line that is replaced is hidden at the end, pauses are shortened, and letters keep their colors."""
    screen = terminal.Screen()
    screen.feed("\x1b[31mfirst & <second>\x1b[0m", 0.0)
    screen.feed("\rlast", 100.0)
    drawing = terminal.svg(screen, "a title")
    past, last = ElementTree.fromstring(drawing).iter(f"{SVG}text")
    assert "".join(past.itertext()) == "first & <second>"
    assert "past" in past.get("class", "")
    assert "".join(last.itertext()) == "lastt & <second>"
    assert last.get("class") == "r1"
    assert 'fill="#ff7b72"' in drawing
    assert "7.5s step-end" in drawing
