"""Every block of Python and of commands in the README, the packages' READMEs and docs/ does what it says.

Commands run, and where a block shows what they print (`$ command`, then lines), that is what they print; of a line that
ends in `...`, its beginning. A block that begins with `# NAME.py` is a file of that name.

- A tutorial begins in an empty folder, and nothing is added: each block of Python is a file with a name, which a
  command of the page runs.
- A guide's blocks of Python are pasted one after the other into one interpreter, in an empty folder; files run alone.
- Elsewhere a block of Python runs in the scene that its page takes for granted, and commands, as those of guides, find
  the files that pages speak of.

What cannot run on a machine of any reader is listed here with what runs in its place, or where it is run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import scene

from accel_testing import limits
from accel_testing.programs import ProgramAndRanks

ROOT = Path(__file__).resolve().parents[2]
_PAGES = [*ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/**/*.md")]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(path.relative_to(ROOT).as_posix() for path in _PAGES)]
TUTORIALS = [page for page in PAGES if page.startswith("docs/tutorials/")]
GUIDES = [page for page in PAGES if page.startswith("docs/guides/")]
OTHERS = [page for page in PAGES if page not in (*TUTORIALS, *GUIDES)]

REPLACED = {
    'log_with="wandb"': 'log_with="tensorboard", project_dir="runs"',  # wandb asks for an account
    "--main-process-ip 10.0.0.1": "--main-process-ip 127.0.0.1 --dry-run",  # needs the second machine
    " 0=24GiB,cpu=64GiB": " cpu=64GiB",
    "--headroom 4x2048": "--headroom 1KiB",  # traces a config.json, which a checkpoint of plain weights has not
}
"""What stands in for a part of a block, and why."""

GALLERY = "the session gallery, which runs these tests once more, with ACCEL_SLOW_BLOCKS set"

ELSEWHERE = (
    (r"\bdynamo_(backend|plugin)=", GALLERY),
    (r"weights_location=\"(checkpoint|packed)\", device_map=\{", GALLERY),
    (r"^pytest -q test_", GALLERY),
    (r"^accel (test|doctor)$", GALLERY),
    (r"nox\b", "the sessions themselves"),
    (r"pip install", "tests-integration/packaging installs every such line"),
    (r"accel config$", "asks questions; answered through a terminal in the tests of accel-launch"),
    (r"until accel launch", "tests-integration/faults/test_preemption.py runs this loop"),
    (r"examples/gallery/", "the session gallery"),
    (r"^python examples/|^accel launch .*examples/train_digits", "the session quickstart, and newcomer/ in shards"),
    (r"^accel verify-parallel .*examples/", "equivalence/test_verify_parallel.py, which holds the page against it"),
    (r"^accel try ", "tests/ranks/test_try.py of accel-verify, on this example and two other scripts"),
    (r"^accel check-resume .*examples/", "faults/test_check_resume.py, on scripts that take less time"),
    (r"^accel check-resume .* train\.py$", GALLERY),
    (r"import accelerate", "tests-integration/packaging runs it beside the original"),
    (r"accel trackers show", "the tests of accel-trackers, on folders with runs"),
    (r"accel plan --train Llama", "a large model; the tests of accel-plan run it on small ones"),
    (r"DeepSpeedPlugin\(", "the session deepspeed, which has the library"),
    (r"--replicas \d", "the tests of accel-torchft, which kill some of them"),
    (r"MegatronLMPlugin\(|from accel_megatron", "the session megatron, which has the library"),
)
"""What is run elsewhere, and where."""


def blocks(page: str, language: str) -> list[tuple[str, str]]:
    """Return the blocks of one language on a page, each with page and line for its title."""
    return [(title, source) for title, found, source in every_block(page) if found == language]


def every_block(page: str) -> list[tuple[str, str, str]]:
    """Return the blocks of a page in order: page and line for a title, language, source."""
    text = (ROOT / page).read_text()
    found = []
    for match in re.finditer(r"^( *)```(\w*)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        source = "\n".join(line.removeprefix(match[1]) for line in match[3].splitlines())
        for old, new in REPLACED.items():
            source = source.replace(old, new)
        found.append((f"{page}:{text[: match.start()].count(chr(10)) + 1}", match[2], source))
    return found


def commands(source: str) -> list[tuple[str, list[str]]]:
    """Split a block into commands, each with the lines that it is shown to print."""
    source = re.sub(r"\\\n\s*", "", source)
    shown = any(line.startswith("$ ") for line in source.splitlines())
    if not shown and source.startswith("accel launch:"):
        return []  # what a command printed, shown alone
    found: list[tuple[str, list[str]]] = []
    for line in source.splitlines():
        if line.startswith("$ ") or not shown:
            found.append((re.sub(r"\s+#.*", "", line.removeprefix("$ ")).strip(), []))
        else:
            found[-1][1].append(line)
    return [(command, output) for command, output in found if command]


def _elsewhere(text: str) -> bool:
    slow = bool(os.environ.get("ACCEL_SLOW_BLOCKS"))
    return any(re.search(pattern, text) for pattern, where in ELSEWHERE if not (slow and where is GALLERY))


def _run(body: Callable[[list[Any], Path, dict[str, str]], None], wanted: list[Any], folder: Path) -> str:
    """Run a function of the scene in a process of its own, and return what it printed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["accel_testing._preload"])
    variables = os.environ | {"WANDB_MODE": "offline", "ACCELERATE_USE_CPU": "true"}
    (folder / "printed").unlink(missing_ok=True)
    process = context.Process(target=body, args=(wanted, folder, variables))
    process.start()
    process.join(limits.limit(30))
    process.kill()
    process.join()
    printed = (folder / "printed").read_text()
    assert process.exitcode == 0, printed
    return printed


def _command(command: str, folder: Path) -> tuple[int, str]:
    """Return the exit status of a command and what it printed; `python FILE` and `accel` are forked."""
    if re.fullmatch(r"python \w+\.py[\w\s-]*", command):
        return 0, _run(scene.run_file, command.split()[1:], folder)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "ACCELERATE_USE_CPU": "true",
        "HF_HOME": str(folder / "cache"), "COLUMNS": "200",
    }  # fmt: skip
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    forked = _forked(command)
    if forked is None:
        done = limits.run(command, shell=True, cwd=folder, env=environment, quiet=30)
    else:
        program, more = forked
        options = {"cwd": folder, "env": environment | more, "stdin": subprocess.DEVNULL}
        done = limits.run(program, started_by=ProgramAndRanks, quiet=30, **options)
    return done.returncode, done.stdout + done.stderr


def _forked(command: str) -> tuple[list[str], dict[str, str]] | None:
    """Return the program and the variables of a command that no shell has to read, if it is one of ours."""
    found = re.fullmatch(r"((?:\w+=\S+ )*)(accel|python -m accel_\w+) ([^|;&<>$*`~]*)", command)
    if found is None:
        return None
    module = "accel_launch" if found[2] == "accel" else found[2].split()[-1]
    return [sys.executable, "-m", module, *shlex.split(found[3])], dict(word.split("=", 1) for word in found[1].split())


def _check(title: str, source: str, folder: Path) -> None:
    """Run the commands of a block, and compare what they print with what stands below each."""
    for command, output in commands(source):
        if _elsewhere(command):
            continue
        status, printed = _command(command, folder)
        fails = any("error:" in line for line in output)
        assert (status != 0) is fails, f"{title}: {command}\n{printed}"
        lines = [line.rstrip() for line in printed.splitlines()]
        for line in output:
            assert _is_printed(line.rstrip(), lines), f"{title}: {command} does not print {line!r}:\n{printed}"


def test_the_examples_of_docstrings_run(tmp_path: Path) -> None:
    """Each example in a docstring of the packages prints what stands below it."""
    sources = sorted(ROOT.glob("packages/*/src"))
    found = [
        (path, source) for source in sources for path in sorted(source.rglob("*.py")) if ">>> " in path.read_text()
    ]
    modules = [".".join(path.relative_to(source).with_suffix("").parts) for path, source in found]
    assert len(modules) > 20
    scene.write_files(tmp_path)
    printed = _run(scene.run_examples, modules, tmp_path)
    assert printed.splitlines()[-1].endswith(" examples, 0 failed"), printed


def _is_printed(line: str, printed: list[str]) -> bool:
    """Return whether a line that is shown was printed, or its beginning where it ends in three dots.

    How wide columns are depends on what else is set.
    """
    line, *printed = (re.sub(r"(?<=\S) {2,}", "  ", each) for each in (line, *printed))
    return any(each == line or (line.endswith("...") and each.startswith(line[:-3])) for each in printed)


@pytest.mark.parametrize("page", [page for page in OTHERS if blocks(page, "python")])
def test_the_python_of_a_page_runs(page: str, tmp_path: Path) -> None:
    """Each block of Python runs to its end, in what its page takes for granted."""
    wanted = [block for block in blocks(page, "python") if not _elsewhere(block[1])]
    scene.write_files(tmp_path)
    printed = _run(scene.run_blocks, wanted, tmp_path)
    assert [line for line in printed.splitlines() if line.startswith("ran ")] == [f"ran {title}" for title, _ in wanted]


@pytest.mark.parametrize("page", [page for page in OTHERS if page.startswith("packages/") and blocks(page, "python")])
def test_the_first_box_of_a_package_stands_alone(page: str, tmp_path: Path) -> None:
    """It runs in an empty folder with nothing before it."""
    first = blocks(page, "python")[:1]
    _run(scene.run_session, [block for block in first if not _elsewhere(block[1])], tmp_path)


@pytest.mark.parametrize("page", [page for page in GUIDES if blocks(page, "python")])
def test_a_guide_can_be_pasted(page: str, tmp_path: Path) -> None:
    """Blocks run one after the other in one interpreter with nothing before them, and those that are files alone."""
    wanted = [block for block in blocks(page, "python") if not _elsewhere(block[1])]
    files = [source for _, source in wanted if scene.name_of(source)]
    for source in files:
        scene.keep_as_file(source, tmp_path)
    pasted = [block for block in wanted if block[1] not in files]
    printed = _run(scene.run_session, pasted, tmp_path)
    assert [line for line in printed.splitlines() if line.startswith("ran ")] == [f"ran {title}" for title, _ in pasted]
    for source in files:
        _run(scene.run_file, [scene.name_of(source)], tmp_path)


def test_the_notebook_runs(tmp_path: Path) -> None:
    """Its cells run from the top in an empty folder, and print what is kept with them."""
    cells = json.loads((ROOT / "docs/guides/notebook.ipynb").read_text())["cells"]
    wanted = [cell for cell in cells if cell["cell_type"] == "code"]
    named = [(f"cell {number}", "".join(cell["source"])) for number, cell in enumerate(wanted)]
    printed = _run(scene.run_session, named, tmp_path).splitlines()
    shown = [line for cell in wanted for output in cell["outputs"] for line in "".join(output["text"]).splitlines()]
    assert shown
    assert not [line for line in shown if line not in printed], printed


@pytest.mark.parametrize("page", TUTORIALS)
def test_a_tutorial_can_be_copied(page: str, tmp_path: Path) -> None:
    """Its files and commands, in order and as they are written, begin in an empty folder and print what is shown."""
    assert not [old for old in REPLACED if old in (ROOT / page).read_text()], "a tutorial runs as it is written"
    files, commanded, imported = [], "", ""
    for title, language, source in every_block(page):
        if language == "python":
            assert scene.name_of(source), f"{title} has no name, so nobody can save it"
            scene.keep_as_file(source, tmp_path)
            files.append(scene.name_of(source))
            imported += source
        elif language == "console":
            _check(title, source, tmp_path)
            commanded += source
    for name in files:
        assert name in commanded or f"from {name[:-3]} import" in imported, f"nothing on {page} runs {name}"


@pytest.mark.parametrize(
    ("title", "source"),
    [block for page in (*GUIDES, *OTHERS) for block in blocks(page, "console")], ids=lambda value: value[:60],
)  # fmt: skip
def test_commands_do_what_is_shown(title: str, source: str, tmp_path: Path) -> None:
    """Each command ends well, or fails as its block shows, and prints what stands below it."""
    scene.write_files(tmp_path)
    for _, language, kept in every_block(title.partition(":")[0]):
        if language in ("python", "yaml"):
            scene.keep_as_file(kept, tmp_path)
    _check(title, source, tmp_path)


def test_what_is_run_elsewhere_is_still_written() -> None:
    """No entry of the two lists outlives the block that it was made for."""
    texts = [(ROOT / page).read_text() for page in PAGES]
    lines = [command for page in PAGES for _, source in blocks(page, "console") for command, _ in commands(source)]
    lines += [source for page in PAGES for _, source in blocks(page, "python")]
    for old in REPLACED:
        assert any(old in text for text in texts), old
    for pattern, _ in ELSEWHERE:
        assert any(re.search(pattern, line) for line in lines), pattern
