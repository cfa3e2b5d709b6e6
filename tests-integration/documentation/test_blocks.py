"""Every block of Python and of commands in the README, the packages' READMEs and docs/ does what it says.

Blocks of Python run in the scene that their page takes for granted. Commands run in a folder with the files that pages
speak of; where a block shows what they print (`$ command`, then lines), that is what they print; of a line that ends in
`...`, its beginning. A block that begins with `# NAME.py` is also a file of that name, which other blocks of its page
find. What cannot run on a machine of any reader is listed here with what runs in its place, or where it is run.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import scene

from accel_core.testing import limits

ROOT = Path(__file__).resolve().parents[2]
_PAGES = [*ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/**/*.md")]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(path.relative_to(ROOT).as_posix() for path in _PAGES)]

REPLACED = {
    '"cuda"': '"cpu"',  # the loop before accel, as people write it for a GPU
    '0: "10GiB", ': "",  # an accelerator, which the reader may not have
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
    (r"import accelerate", "tests-integration/packaging runs it beside the original"),
    (r"accel trackers (show|replay)", "the tests of accel-trackers, on folders with runs"),
    (r"accel plan --train Llama", "a large model; the tests of accel-bigmodel run it on small ones"),
    (r"DeepSpeedPlugin\(", "the session deepspeed, which has the library"),
    (r"MegatronLMPlugin\(|from accel_megatron", "the session megatron, which has the library"),
)
"""What is run elsewhere, and where."""


def blocks(page: str, language: str) -> list[tuple[str, str]]:
    """Return the blocks of one language on a page, each with page and line for its title."""
    text = (ROOT / page).read_text()
    found = []
    for match in re.finditer(rf"^( *)```{language}\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        source = "\n".join(line.removeprefix(match[1]) for line in match[2].splitlines())
        for old, new in REPLACED.items():
            source = source.replace(old, new)
        found.append((f"{page}:{text[: match.start()].count(chr(10)) + 1}", source))
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
    """Run a function of the scene in a process of its own, in a folder with the files of the scene."""
    scene.write_files(folder)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["accel_core.testing._preload"])
    variables = os.environ | {"WANDB_MODE": "offline", "ACCELERATE_USE_CPU": "true"}
    process = context.Process(target=body, args=(wanted, folder, variables))
    process.start()
    process.join(limits.limit(30))
    process.kill()
    process.join()
    printed = (folder / "printed").read_text()
    assert process.exitcode == 0, printed
    return printed


def test_the_examples_of_docstrings_run(tmp_path: Path) -> None:
    """Each example in a docstring of the packages prints what stands below it."""
    sources = sorted(ROOT.glob("packages/*/src"))
    found = [
        (path, source) for source in sources for path in sorted(source.rglob("*.py")) if ">>> " in path.read_text()
    ]
    modules = [".".join(path.relative_to(source).with_suffix("").parts) for path, source in found]
    assert len(modules) > 20
    printed = _run(scene.run_examples, modules, tmp_path)
    assert printed.splitlines()[-1].endswith(" examples, 0 failed"), printed


def _is_printed(line: str, printed: list[str]) -> bool:
    """Return whether a line that is shown was printed, or its beginning where it ends in three dots."""
    return any(each == line or (line.endswith("...") and each.startswith(line[:-3])) for each in printed)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_the_python_of_a_page_runs(page: str, tmp_path: Path) -> None:
    """Each block of Python runs to its end, in what its page takes for granted."""
    wanted = [block for block in blocks(page, "python") if not _elsewhere(block[1])]
    printed = _run(scene.run_blocks, wanted, tmp_path)
    assert [line for line in printed.splitlines() if line.startswith("ran ")] == [f"ran {title}" for title, _ in wanted]


@pytest.mark.parametrize(
    ("title", "source"), [block for page in PAGES for block in blocks(page, "console")], ids=lambda value: value[:60]
)
def test_commands_do_what_is_shown(title: str, source: str, tmp_path: Path) -> None:
    """Each command ends well, or fails as its block shows, and prints what stands below it."""
    scene.write_files(tmp_path)
    for _, python in blocks(title.partition(":")[0], "python"):
        scene.keep_as_file(python, tmp_path)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "ACCELERATE_USE_CPU": "true",
        "HF_HOME": str(tmp_path / "cache"), "COLUMNS": "200",
    }  # fmt: skip
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for command, output in commands(source):
        if _elsewhere(command):
            continue
        done = limits.run(command, shell=True, cwd=tmp_path, env=environment, quiet=30)
        printed = [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]
        fails = any("error:" in line for line in output)
        assert (done.returncode != 0) is fails, f"{title}: {command}\n{done.stdout}{done.stderr}"
        for line in output:
            assert _is_printed(line.rstrip(), printed), (
                f"{title}: {command} does not print {line!r}:\n{done.stdout}{done.stderr}"
            )


def test_what_is_run_elsewhere_is_still_written() -> None:
    """No entry of the two lists outlives the block that it was made for."""
    texts = [(ROOT / page).read_text() for page in PAGES]
    lines = [command for page in PAGES for _, source in blocks(page, "console") for command, _ in commands(source)]
    lines += [source for page in PAGES for _, source in blocks(page, "python")]
    for old in REPLACED:
        assert any(old in text for text in texts), old
    for pattern, _ in ELSEWHERE:
        assert any(re.search(pattern, line) for line in lines), pattern
