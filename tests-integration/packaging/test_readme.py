"""What the README tells a reader to type is right, and what CI runs is what it says."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {
    "accel-core": set(),
    "accel-bigmodel": {"accel-core"},
    "accel-launch": {"accel-core"},
    "accel-parallel": {"accel-core"},
    "accel-deepspeed": {"accel-core"},
    "accel-megatron": {"accel-core", "accel-parallel"},
    "accel-torchft": {"accel-core"},
    "accel-trackers": {"accel-core"},
    "accel-plan": {"accel-core", "accel-bigmodel"},
    "accel-quant": {"accel-core", "accel-bigmodel"},
    "accel-verify": {"accel-core", "accel-launch"},
    "accel-testing": {"accel-core"},
}
NEEDS["accel-all"] = NEEDS.keys() - {"accel-deepspeed", "accel-megatron", "accel-testing", "accel-torchft"}
NEEDS["accel-compat"] = {*NEEDS["accel-all"], "accel-all"}
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md")), *sorted(ROOT.glob("docs/**/*.md"))]


def install_lines() -> list[tuple[str, str]]:
    """Return every line of every page that installs a package of this repository, with the page's name."""
    lines = []
    for page in PAGES:
        lines += [
            (page.relative_to(ROOT).as_posix(), line)
            for line in page.read_text().splitlines()
            if "pip install" in line and re.search(r"\baccel-\w+\b|requirements\.txt", line)
        ]
    return lines


def test_the_declared_siblings_are_these() -> None:
    """The table that these tests go by is what the packages declare."""
    for name, needed in NEEDS.items():
        text = (ROOT / "packages" / name / "pyproject.toml").read_text()
        declared = set(re.findall(r'"(accel-\w+)[>=<]', text.partition("[project.optional-dependencies]")[0]))
        closure = declared.union(*(NEEDS[other] for other in declared))
        assert closure == needed, name


@pytest.mark.parametrize(("page", "line"), install_lines())
def test_an_install_line_names_all_that_it_needs(page: str, line: str) -> None:
    """No documented command can fetch a package of ours from an index, where it would be a stranger's."""
    if "--no-index" in line:
        assert "--find-links dist" in line
        return
    listed = (ROOT / "requirements.txt").read_text() if "-r requirements.txt" in line else ""
    named = set(re.findall(r"packages/(accel-\w+)", line + listed))
    assert named, f"{page}: names no local folder: {line}"
    for name in named:
        assert NEEDS[name] <= named, f"{page}: {name} needs {sorted(NEEDS[name] - named)} in the same command"


def test_the_default_torch_is_the_tested_one() -> None:
    """The requirements and the pages install the minor version of torch that the tests run with."""
    tested = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert tested is not None
    for name in ("requirements.txt", "README.md", "docs/installation.md"):
        assert f"torch=={tested[1]}.*" in (ROOT / name).read_text(), name


def test_the_figures_are_those_that_were_measured() -> None:
    """Each figure of the README's table stands in the section of the benchmark that the row names."""
    text = (ROOT / "README.md").read_text()
    table = text[text.index("<!-- figures -->") : text.index("<!-- end of figures -->")]
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.endswith("` |")
    ]
    assert len(rows) >= 6
    for what, ours, theirs, benchmark in rows:
        name = benchmark.strip("`")
        section = results[results.index(f"<!-- {name} -->") : results.index(f"<!-- end of {name} -->")]
        figures = set(re.findall(r"[+-]?[\d.,]*\d", section))
        for cell in (ours, theirs):
            assert cell.split()[0] in figures, f"{what}: {cell} is not in the section {name}"


def test_ci_runs_the_command_of_the_readme() -> None:
    """The pattern by which `.ci/run` takes its command from the README finds exactly one line."""
    script = (ROOT / ".ci" / "run").read_text()
    found = re.search(r"command=\$\(grep -m 1 -E '([^']+)' README\.md\)", script)
    assert found is not None
    pattern = found[1]
    done = subprocess.run(
        ["grep", "-c", "-E", pattern, str(ROOT / "README.md")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"


def test_the_readme_shows_the_ways_to_begin() -> None:
    """The command of the main job makes its own environment; big models alone, all, and a pinned package install."""
    lines = " ".join(line for page, line in install_lines() if page == "README.md")
    assert all(words in lines for words in ("-r requirements.txt", "./packages/accel-bigmodel", "--no-index"))
    text = (ROOT / "README.md").read_text()
    line = "python3 -m venv .venv && .venv/bin/pip install -q nox && .venv/bin/nox"
    assert f"\n{line} -s quickstart\n" in text
    assert f"\n{line}\n" in text


@pytest.mark.parametrize("folder", sorted(ROOT.glob("packages/*/")), ids=lambda folder: folder.name)
def test_a_package_is_whole_on_an_index_page(folder: Path) -> None:
    """Its README has no link into the repository, which an index does not show; its metadata say where it is from."""
    links = re.findall(r"\]\(([^)\s]+)\)", (folder / "README.md").read_text())
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    urls = dict(re.findall(r'^(\w+) = "(https://[^"]+)"$', (folder / "pyproject.toml").read_text(), re.MULTILINE))
    assert urls.keys() == {"Documentation", "Source", "Changelog"}
    assert urls["Source"].endswith(f"/packages/{folder.name}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of every page names a file or folder that exists."""
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
