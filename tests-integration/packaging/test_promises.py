"""Every promise of README, of SECURITY.md and of the guides has a test in the first tier.

`promises.txt` says which; SECURITY.md says it itself.
"""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHORT = {
    **{folder.name.removeprefix("accel-"): f"{folder.relative_to(ROOT)}/tests" for folder in ROOT.glob("packages/*")},
    "together": "tests-integration",
}
ELSEWHERE = ("tests-integration/interop/", "tests-integration/gallery/")
"""Folders of sessions of the second tier, but for these files."""
EQUAL = re.compile(
    r"bit for bit|equals? (to )?one process|trains? as (in |on )?one process|counts as on one process|"
    r"those of one process|up to rounding|single precision|the same (result|losses)\b|with the same weights|"
    r"the same numbers \||`set_seed\(0\)` gives"
)
"""How pages say that two runs give the same."""
COMPARED_BY_INTEROP = ("trl: SFT, DPO", "On two processes, results agree", "two ranks they agree to single precision")
"""Lines on libraries that `nox -s interop` compares with the original, as their pages say."""
HERE = tuple(f"tests-integration/{name}.py" for name in ("interop/test_checkpoint_exchange", "interop/test_smoke"))


def told() -> dict[str, dict[str, list[str]]]:
    """Return the tests of each promise of each page."""
    found: dict[str, dict[str, list[str]]] = {}
    page = ""
    for line in Path(__file__).with_name("promises.txt").read_text().partition("\n\n")[2].splitlines():
        if line.startswith("= "):
            tests = found[page].setdefault(line.removeprefix("= "), [])
        elif line.startswith(" "):
            short, _, rest = line.strip().partition("/")
            tests.append(f"{SHORT[short]}/{rest}")
        elif line:
            page = line
            found[page] = {}
    return found


PROMISES = [(page, promise, tests) for page, promises in told().items() for promise, tests in promises.items()]


def secured() -> dict[str, list[str]]:
    """Return the tests that each paragraph of SECURITY.md's promises names."""
    text = (ROOT / "SECURITY.md").read_text().partition("## What accel promises\n")[2].partition("\n## ")[0]
    found = {}
    for paragraph in text.strip().split("\n\n")[1:]:
        file, tests = "", []
        for name in re.findall(r"`([^`\s]*test_\w+(?:\.py)?(?:::\w+)?)`", paragraph):
            path, _, test = name.partition("::")
            if path:
                short, _, rest = path.partition("/")
                full = f"{SHORT[short]}/unit/{rest}" if short in SHORT else path
                file = full if "/" in full else f"{file.rpartition('/')[0]}/{full}"
            tests.append(f"{file}::{test}" if test else file)
        found[paragraph.split("**")[1] if "**" in paragraph else paragraph[:60]] = tests
    return found


@functools.cache
def named_in(file: str) -> dict[str, bool]:
    """Return the tests and classes of a file, and whether each is of the second tier as a whole."""
    tree = ast.parse((ROOT / file).read_text())
    marks = {"full"}

    def is_mark(node: ast.expr) -> bool:
        node = node.func if isinstance(node, ast.Call) else node
        return (isinstance(node, ast.Attribute) and node.attr in marks) or (
            isinstance(node, ast.Name) and node.id in marks
        )

    whole = False
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
            if any(map(is_mark, values)):
                marks.add(node.targets[0].id)
                whole = whole or node.targets[0].id == "pytestmark"
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {
        node.name: whole or any(map(is_mark, node.decorator_list)) for node in ast.walk(tree) if isinstance(node, kinds)
    }


def wanting(test: str) -> str:
    """Return what is wrong with a test that a promise names, if anything is."""
    file, _, name = test.partition("::")
    if not (ROOT / file).is_file() or (name and name not in named_in(file)):
        return f"there is no {test}"
    if file.startswith(ELSEWHERE) and file not in HERE:
        return f"a session of the second tier has {test}"
    return f"of the second tier: {test}" if name and named_in(file)[name] else ""


@pytest.mark.parametrize(("page", "promise", "tests"), PROMISES, ids=[promise[:50] for _, promise, _ in PROMISES])
def test_a_promise_is_kept(page: str, promise: str, tests: list[str]) -> None:
    """It still stands on its page, and has tests, all of which the first tier runs."""
    assert promise in (ROOT / page).read_text()
    assert tests
    assert [problem for problem in map(wanting, tests) if problem] == []


@pytest.mark.parametrize(("paragraph", "tests"), secured().items(), ids=secured())
def test_security_names_named_in_the_first_tier(paragraph: str, tests: list[str]) -> None:
    """Each paragraph of what SECURITY.md promises names tests, all of which the first tier runs."""
    assert tests, paragraph
    assert [problem for problem in map(wanting, tests) if problem] == []


def test_every_row_of_the_readme_is_a_promise() -> None:
    """No row of a table, and no point of the list, stands in README without a test."""
    text = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    heads = re.compile(r"^\|(.*)\|\n\|[-|]+\|$", re.MULTILINE)
    lines = [line for line in heads.sub("", text).splitlines() if line.startswith(("| ", "- **"))]
    assert len(lines) > 20
    assert [line for line in lines if not any(promise in line for promise in told()["README.md"])] == []


def test_every_sentence_that_calls_runs_equal_is_a_promise() -> None:
    """Of README, guides, concepts and reference; tutorials are run as they stand, and their boxes compare."""
    pages = [
        ROOT / "README.md",
        *(page for page in sorted(ROOT.glob("docs/*/*.md")) if page.parent.name != "tutorials"),
    ]
    found = []
    for path in pages:
        page = path.relative_to(ROOT).as_posix()
        kept = [*told().get(page, ()), *COMPARED_BY_INTEROP]
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        claims = [line for line in text.splitlines() if EQUAL.search(line)]
        found += [f"{page}: {line}" for line in claims if not any(promise in line for promise in kept)]
    assert found == []


@pytest.mark.parametrize(
    "test",
    [
        "tests-integration/packaging/test_promises.py::test_nobody_wrote",
        "tests-integration/interop/test_clients.py",
        "tests-integration/simulated_device/test_gpu_kit.py::test_a_dry_run_shows_no_figure",
    ],
)
def test_a_test_that_is_not_run_is_found(test: str) -> None:
    """One that is not there, of a session of the second tier, or marked `full` keeps no promise."""
    assert test in wanting(test)
