"""The site's search: what is mended in it, and what readers search for; `nox -s docs` fails where it finds no guide.

The theme's search is a script with lunr in it, which a browser runs apart from the page. `problems` runs that script of
the built site on the site's index, in V8, the engine of Chromium.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from pathlib import Path

from py_mini_racer import MiniRacer

LIST = Path(__file__).with_suffix(".txt")

MENDED = {
    # lunr writes the number of a node directly after the letter that leads to it, so that parts of words with digits
    # are taken for one another; a search that meets one of them then throws.
    "e=e+s+o.id": 'e=e+s+o.id+","',
    # Every word of a search is a prefix: "load a checkpoint" also found all words that begin with "a". The last word
    # may be half typed.
    r".split(/\s+/g)": r".split(/\s+/g).filter((w,i,all)=>i==all.length-1||lunr.stopWordFilter(w.toLowerCase()))",
}

_BROWSER = """
var self = globalThis, console = {warn: text => warnings.push(String(text))}, listener, warnings, found;
function addEventListener(kind, called) { listener = called; }
function postMessage(message) { found = message.data; }
function send(type, data) { found = null, warnings = []; listener({data: {type, data}}); }
"""


def mended(script: str) -> str:
    """Return the theme's script of the search with its faults mended."""
    for old, new in MENDED.items():
        assert script.count(old) == 1, f"the theme's search has changed: {old} is not there once"
        script = script.replace(old, new)
    return script


def rank_api(index: Path, exported: set[str]) -> None:
    """Put the API after guides that name the same thing, what `accel` exports before the rest of it."""
    found = json.loads(index.read_text())
    for entry in found["docs"]:
        page, _, name = entry["location"].partition("#")
        if page.startswith("reference/api/"):
            entry["title"] = entry["title"].partition("  <code>")[0]  # without "property" and the like
            public = name in exported or name.rpartition(".")[0] in exported
            entry["boost"] = 0.002 if public else 0.001  # a word counts a thousand times in a title
    index.write_text(json.dumps(found, separators=(",", ":")))


def problems(site: Path) -> list[str]:
    """Return a line for each search that fails, finds a page of the API first, or another page than it should."""
    index = json.loads((site / "search" / "search_index.json").read_text())
    lines = (line.partition("->") for line in LIST.read_text().splitlines() if line and not line.startswith("#"))
    asked = dict.fromkeys((*string.ascii_lowercase, *string.digits, *_frequent_words(index["docs"])), "")
    asked |= {words.strip(): page.strip() for words, _, page in lines}
    (script,) = site.glob("assets/javascripts/workers/search.*.js")
    found = []
    with MiniRacer() as engine:
        engine.eval(_BROWSER + script.read_text())
        engine.eval(f"send(0, {json.dumps(index | {'options': {'suggest': True}})})")
        for words, page in asked.items():
            engine.eval(f"send(2, {json.dumps(words)})")
            answer = str(engine.eval("JSON.stringify([warnings, found.items.map(group => group[0].location)])"))
            warnings, places = json.loads(answer)
            first = (places or [""])[0].partition(".html")[0]
            if warnings or not first:
                found.append(f"a search for {words!r} finds nothing {warnings}")
            elif (page or first) != first or (first.startswith("reference/api/") and len(words) > 1):
                found.append(f"a search for {words!r} finds {first} before {page or 'a guide'}")
    return found


def _frequent_words(pages: list[dict[str, str]]) -> list[str]:
    """Return the 150 words that are most often on the pages."""
    text = " ".join(f"{page['title']} {page['text']}" for page in pages)
    counted = Counter(re.findall(r"[a-z]{2,}", re.sub(r"<[^>]*>|&\w+;", " ", text).lower()))
    return [word for word, _ in counted.most_common(150)]
