"""The laws of ARCHITECTURE.md that are read off the source."""

import ast
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def load(name: str) -> ModuleType:
    """Load a module that lies beside this file."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


laws = load("laws")
Law = Callable[[str, ast.Module], list[object]]
BREACHES = [
    (laws.local_imports, "def f():\n    import json\n"),
    (laws.local_imports, "def f():\n    from accel_core.state import PartialState\n"),
    (laws.environment_reads, "import os\nx = os.environ['A']\n"),
    (laws.environment_reads, "from os import environ\n"),
    (laws.label_ladders, "def f(state, T):\n    if state.distributed_type == T.FSDP:\n        pass\n"),
    (laws.label_ladders, "def f(distributed_type, T):\n    return distributed_type in (T.FSDP,)\n"),
    (laws.absent_accelerators, "import torch\nx = torch.accelerator.current_accelerator()\n"),
    (laws.private_advice, "raise StateError(f'It is {wrong}; call State._reset() first.')\n"),
    (laws.private_advice, "logger.warning_once('Call _reset() first.')\n"),
]
LAWS = list(dict.fromkeys(law for law, _ in BREACHES))


ROOT = Path(__file__).resolve().parents[2]
WAY = ROOT.joinpath("ARCHITECTURE.md").read_text().partition("## 1. Laws")[0]
STEPS = [re.findall(r"`([\w./]+)`", step) for step in re.split(r"^\d\. |\n\n(?=Between)", WAY, flags=re.MULTILINE)[1:6]]


def test_names_are_nouns_of_the_field() -> None:
    """No file or folder is called utils, helpers, common, misc, other or base_*."""
    assert not list(map(str, laws.badly_named()))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step[0])
def test_the_way_to_the_line_that_shards_is_as_described(step: list[str]) -> None:
    """Each of the five files has the function that ARCHITECTURE.md names, which makes the calls named after it."""
    file, name, *calls = step
    node: ast.AST = ast.parse(next(ROOT.glob(f"packages/*/src/{file}")).read_text())
    for part in name.split("."):
        node = [one for one in ast.walk(node) if getattr(one, "name", None) == part][-1]  # behind its overloads
    assert calls
    assert set(calls) <= {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}


@pytest.mark.parametrize("engine", laws.ENGINES)
def test_core_and_launcher_name_engines_only_as_needed(engine: str) -> None:
    """A line more is one that belongs into the engine's package."""
    found = laws.lines_that_name(engine)
    assert len(found) <= laws.ENGINES[engine], "\n".join(map(str, found))


def test_a_line_that_names_an_engine_is_found(tmp_path: Path) -> None:
    """Code and comments of core count in every case; other packages may say what they like."""
    for package in ("accel_core", "accel_deepspeed"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "x.py").write_text("a = 1  # for DeepSpeed\n\nuse_deepspeed = 2\n")
    found = laws.lines_that_name("deepspeed", sorted(tmp_path.iterdir()))
    assert [(one.file, one.line) for one in found] == [("accel_core/x.py", 1), ("accel_core/x.py", 3)]


@pytest.mark.parametrize("law", LAWS)
def test_the_law_holds_in_every_file(law: Law) -> None:
    """No source file of any package breaks the law."""
    found = [str(breach) for name, tree in laws.files() for breach in law(name, tree)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("law", "source"), BREACHES)
def test_a_breach_is_found(law: Law, source: str) -> None:
    """The check of each law finds what it is there to find."""
    assert law("accel_core/somewhere.py", ast.parse(source))


def test_limits_of_tests_grow_with_the_machine() -> None:
    """No test waits for a fixed number of seconds."""
    found = [str(breach) for name, tree in laws.tests() for breach in laws.literal_limits(name, tree)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "process.communicate(timeout=20)",
        "done.wait(5)",
        "end = time.monotonic() + 60",
        "assert time.monotonic() - t < 9",
    ],
)
def test_a_literal_limit_is_found(source: str) -> None:
    """Each way to wait for a number of seconds is seen."""
    assert laws.literal_limits("tests/test_x.py", ast.parse(source))


def test_every_source_file_is_read() -> None:
    """The checks see the files of all packages, so that they cannot pass on nothing."""
    tops = {name.split("/")[0] for name, _ in laws.files()}
    assert tops == laws.OWN
    assert len(tops) >= 7


named_modules = load("named_modules")
_HEIGHT = {
    "accel_core": 0,
    **dict.fromkeys(("accel_launch", "accel_parallel", "accel_trackers"), 1),
    **dict.fromkeys(("accel_bigmodel", "accel_deepspeed", "accel_megatron", "accel_torchft"), 2),
    "accel_plan": 3,
    "accel_quant": 3,
    "accel_verify": 3,
    "accel": 4,
    "accel_testing": 5,
}


def test_modules_named_in_strings_make_no_circle() -> None:
    """What is imported by its name when it is first used counts too: no two files or folders need each other."""
    circles = named_modules.circles(named_modules.edges(named_modules.modules()))
    assert not [" <-> ".join(circle) for circle in circles]


def test_no_module_names_one_of_a_package_above_it() -> None:
    """A lower distribution finds what is above it by entry points, and never by name."""
    found = named_modules.edges(named_modules.modules())
    upwards = [
        f"{source} names {target}"
        for source, targets in found.items()
        for target in targets
        if _HEIGHT[source.split(".")[0]] < _HEIGHT[target.split(".")[0]]
    ]
    assert not upwards


def test_a_circle_through_a_string_is_found(tmp_path: Path) -> None:
    """Two files, one of which names the other in a string, are a circle."""
    (tmp_path / "one.py").write_text("from accel_core.place.two import x\n")
    (tmp_path / "two.py").write_text("home = 'accel_core.place.one:f'\n")
    known = {f"accel_core.place.{name}": tmp_path / f"{name}.py" for name in ("one", "two")}
    assert named_modules.circles(named_modules.edges(known)) == [["accel_core.place.one", "accel_core.place.two"]]


def test_the_second_tier_is_listed_with_its_reasons() -> None:
    """Each reason for which a test is left to the second tier has its row in CONTRIBUTING.md, and each row tests."""
    root = Path(__file__).parents[2]
    sources = [*root.glob("packages/*/tests/**/*.py"), *root.glob("tests-integration/**/*.py")]
    given = {why for path in sources for why in re.findall(r'mark\.full\(\s*"([^"]*)"', path.read_text())}
    table = (root / "CONTRIBUTING.md").read_text().partition("| reason, or session |")[2].partition("\n\n")[0]
    rows = {line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]}
    assert given == {row for row in rows if not row.startswith("`")}
