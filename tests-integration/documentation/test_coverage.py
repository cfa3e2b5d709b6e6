"""The documentation leaves nothing out: variables, errors and pages."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from accel_launch.settings.table import ALL

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
VARIABLE = re.compile(
    r'"((?:ACCEL|ACCELERATE|FSDP|MEGATRON_LM|PARALLELISM_CONFIG|XLA|HF|XDG|MLFLOW|KMP)_[A-Z0-9_]*[A-Z0-9])"'
)
NO_VARIABLES = {"FSDP_MODEL_NAME", "FSDP_PYTORCH_VERSION"}
"""Constants whose values look like a variable's name."""
BRITISH = re.compile(
    r"(?:custom|nitial|material|maxim|minim|normal|ptim|rgan|quant|serial|pecial|summar|ynchron)is(?:ing|ation|e(?!s?_late))"
    r"|(?:ehavio|olo|avo|ono|eighbo)ur|labelled|travelling"
)
"""Parts of words; `synchronise_late` is a name of the public interface, which keeps its spelling."""


def test_every_variable_is_described() -> None:
    """A variable that the source names is on the page of variables, or stands for an option of the options' page."""
    pages = "".join((DOCS / "reference" / name).read_text() for name in ("environment.md", "options.md"))
    named = {
        match[1] for path in (ROOT / "packages").glob("*/src/**/*.py") for match in VARIABLE.finditer(path.read_text())
    }
    named |= {setting.environment for setting in ALL if setting.option}
    assert len(named) > 100
    missing = sorted(name for name in named - NO_VARIABLES if f"`{name}`" not in pages)
    assert not missing, f"describe these in docs/reference/environment.md: {missing}"


def test_every_error_has_a_remedy() -> None:
    """The docstring of each error says in a second paragraph what to do, which the page of errors shows."""
    tree = ast.parse((ROOT / "packages/accel-core/src/accel_core/errors.py").read_text())
    errors = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Error")]
    assert len(errors) > 20
    for error in errors:
        paragraphs = (ast.get_docstring(error) or "").split("\n\n")
        if error.name != "AccelError":
            assert len(paragraphs) > 1, error.name
            assert not paragraphs[1].startswith("Args:"), error.name


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_every_page_can_be_reached(page: Path) -> None:
    """A page is in the navigation of the site, and the documentation's first page leads to it."""
    name = page.relative_to(DOCS).as_posix()
    navigation = (DOCS / "site" / "mkdocs.yml").read_text()
    start = (DOCS / "README.md").read_text()
    if name.startswith("reference/api/"):
        return  # the reference's own navigation is made from the source
    assert name in navigation
    assert name == "README.md" or f"({name})" in start


SEARCHED = [
    "NaN",
    "OOM",
    "MoE",
    "70B",
    "EMA",
    "freeze",
    "early stopping",
    "validation",
    "seeds",
    "gradient checkpointing",
]


@pytest.mark.parametrize("words", SEARCHED)
def test_what_people_search_for_is_a_heading(words: str) -> None:
    """A guide has a heading with these words, which a search finds first."""
    text = "\n".join(page.read_text() for page in sorted((DOCS / "guides").glob("*.md")))
    assert re.search(rf"^#+ .*\b{words}\b", text, re.MULTILINE | re.IGNORECASE)


def test_spelling_is_american() -> None:
    """Sources, tests and pages have no British spelling."""
    folders = [ROOT / name for name in (".ci", "benchmarks", "docs", "examples", "packages", "tests-integration")]
    files = [path for folder in folders for kind in ("*.py", "*.md") for path in folder.rglob(kind)]
    texts = {path: path.read_text() for path in {*files, *ROOT.glob("*.md")} - {Path(__file__)}}
    found = {f"{path.relative_to(ROOT)}: …{word}…" for path, text in texts.items() for word in BRITISH.findall(text)}
    assert not found
    assert BRITISH.findall("The behaviour of initialised colours") == ["ehaviour", "nitialise", "olour"]
