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
    "accel-megatron": {"accel-core"},
    "accel-trackers": {"accel-core"},
    "accel-quant": {"accel-core", "accel-bigmodel"},
    "accel-all": {"accel-core", "accel-bigmodel", "accel-launch", "accel-trackers", "accel-quant"},
    "accel-compat": {"accel-core", "accel-bigmodel", "accel-launch", "accel-trackers", "accel-quant", "accel-all"},
}
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md")), *sorted(ROOT.glob("docs/**/*.md"))]


def install_lines() -> list[tuple[str, str]]:
    """Return every line of every page that installs a package of this repository, with the page's name."""
    lines = []
    for page in PAGES:
        lines += [
            (page.relative_to(ROOT).as_posix(), line)
            for line in page.read_text().splitlines()
            if "pip install" in line
            and re.search(r"\baccel-(core|bigmodel|launch|megatron|trackers|quant|all|compat)\b", line)
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
    named = set(re.findall(r"packages/(accel-\w+)", line))
    assert named, f"{page}: names no local folder: {line}"
    for name in named:
        assert NEEDS[name] <= named, f"{page}: {name} needs {sorted(NEEDS[name] - named)} in the same command"


def test_there_are_three_ways_to_install() -> None:
    """The README shows big models alone, everything, and a pinned package."""
    assert len([line for page, line in install_lines() if page == "README.md"]) >= 3


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


def test_the_first_run_is_one_line() -> None:
    """The README's command for the main job makes its own environment."""
    text = (ROOT / "README.md").read_text()
    line = "python3 -m venv .venv && .venv/bin/pip install -q nox && .venv/bin/nox"
    assert f"\n{line} -s quickstart\n" in text
    assert f"\n{line}\n" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of every page names a file or folder that exists."""
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
