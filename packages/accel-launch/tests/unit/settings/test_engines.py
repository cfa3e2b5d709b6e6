"""Which engines the settings of a run choose, and how what is installed is shown."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_core.options.engines import PUBLIC, Public, engines
from accel_launch.settings.child import child_environment
from accel_launch.settings.engines import asked_for
from accel_testing import limits, requires

MESH = ["--use-fsdp", "--fsdp-version", "2", "--use-parallelism-config", "--parallelism-config-dp-shard-size", "2"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--cpu"], []),
        (["--cpu", "--num-processes", "2"], ["ddp"]),
        (["--use-fsdp"], ["fsdp1"]),
        ([*MESH, "--num-processes", "4", "--parallelism-config-tp-size", "2"], ["fsdp2", "tp"]),
        (["--use-deepspeed", "--num-processes", "2"], ["deepspeed"]),
        (["--tpu"], ["xla"]),
        (["--cpu", "--mixed-precision", "fp8", "--fp8-backend", "te"], ["fp8-te"]),
    ],
)
@requires("engine:fsdp", "engine:deepspeed")
def test_settings_choose_engines(settings, words: list[str], wanted: list[str]) -> None:
    """Switches, sizes of a mesh, processes and the number format name the engines."""
    assert [engine.name for engine in asked_for(settings(*words, "s.py"))] == wanted


def test_fp8_without_a_library_is_the_first_that_is_installed(
    settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where no fp8 library is named the first installed one is chosen, as in a training process."""
    said = settings("--cpu", "--mixed-precision", "fp8", "s.py")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert [engine.name for engine in asked_for(said)] == ["fp8-ao"]
    info = tmp_path / "ms_amp-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ms-amp\nVersion: 1.0\n")
    assert [engine.name for engine in asked_for(said)] == ["fp8-msamp"]


def test_explain_and_env_name_every_engine(command) -> None:
    """--explain and `accel env` list all engines with version or remedy, for people and as JSON."""
    known = [engine for engine in engines().values() if engine.library]
    (last,) = [
        row
        for row in json.loads(command("launch", "--cpu", "--num-processes", "2", "--explain", "--json", "s.py").out)
        if row["key"] == "engines"
    ]
    assert [row["name"] for row in last["value"]] == [engine.name for engine in known]
    assert [row["name"] for row in last["value"] if row["chosen"]] == ["ddp"]
    assert all(bool(row["version"]) or row["remedy"].startswith("pip install ") for row in last["value"])
    shown = command("launch", "--cpu", "--num-processes", "2", "--explain", "s.py").out
    assert "* ddp       DistributedDataParallel: torch " in shown
    shown = command("env").out
    assert all(f"\t- {engine.name}: {engine.title}: {engine.library} " in shown for engine in known)
    assert [row["name"] for row in json.loads(command("env", "--json").out)["engines"]] == [row.name for row in known]


def test_explain_does_not_import_torch(tmp_path: Path) -> None:
    """Engines are looked up in metadata: a look at the settings brings neither torch nor a library of an engine."""
    code = (
        "import sys; from accel_launch import cli; cli.main(['launch', '--explain', 's.py'])\n"
        "sys.exit(bool({'torch', 'deepspeed', 'torchao'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False).returncode == 0


ALONE = """
import sys
from accel_core.host import installed
installed.points_of = lambda group: {}  # as where no package announces an engine
from accel_launch import cli
sys.exit(cli.main(sys.argv[1:]))
"""
OF_ENGINES = [known for known in PUBLIC if known.files]


@pytest.fixture
def alone(tmp_path: Path, variables: dict[str, str]) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Run `accel launch` where no engine's package is installed, on a script that leaves a file."""
    (tmp_path / "s.py").write_text("open('started', 'w').close()\n")

    def run(*words: str, config: str = "{}", **more: str) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "c.yaml").write_text(config)
        command = [sys.executable, "-c", ALONE, "launch", "--config-file", "c.yaml", *words, "s.py"]
        return limits.run(command, quiet=6, cwd=tmp_path, env={**variables, **more}, stdin=subprocess.DEVNULL)

    return run


@pytest.mark.parametrize("known", OF_ENGINES, ids=lambda known: known.word)
@pytest.mark.parametrize(
    ("words", "config", "variable", "asked"),  # the last is what the error says was asked for
    [
        (["--use_{word}"], "", "", "use_{word}"),
        (["--use_{word}", "--explain"], "", "", "use_{word}"),
        (["--use_{word}", "--dry-run"], "", "", "use_{word}"),
        (["--use_{word}", "--{word}_degree", "2"], "", "", "use_{word}"),
        (["--{word}_degree=2"], "", "", "the option --{word}_degree"),
        (["{option}", "1"], "", "", "the option {option}"),
        ([], "{word}_config:\n  {word}_degree: 2\n", "", "c.yaml:1"),
        ([], "distributed_type: {label}\n", "", "use_{word}"),
        ([], "", "ACCELERATE_USE_{label}", "use_{word}"),
    ],
)
def test_an_engine_whose_package_is_not_installed_is_named(
    alone: Callable[..., "subprocess.CompletedProcess[str]"],
    tmp_path: Path,
    known: Public,
    words: list[str],
    config: str,
    variable: str,
    asked: str,
) -> None:
    """A flag, a file or a variable that asks for it is one error with the package, and nothing is started."""
    option = "--zero-stage" if known.options else f"--{known.word}-degree"
    filled = [
        text.format(word=known.word, label=known.word.upper(), option=option)
        for text in (*words, config, variable, asked)
    ]
    *said, config, variable, asked = filled
    done = alone(*said, config=config or "{}", **({variable: "true"} if variable else {}))
    assert done.returncode == 1, done.stdout
    assert f"{known.package} is not installed" in done.stderr
    assert asked in done.stderr
    assert done.stderr.rstrip().endswith(f"Run `pip install {known.package}`.")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "started").exists()


def test_empty_sections_need_no_package(
    alone: Callable[..., "subprocess.CompletedProcess[str]"], tmp_path: Path
) -> None:
    """Sections without settings, which Accelerate writes for every engine, are those of a run without engines."""
    done = alone("--cpu", config="".join(f"{known.word}_config: {{}}\n" for known in OF_ENGINES))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "started").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--cpu"],
        ["--use-fsdp"],
        [*MESH, "--num-processes", "4", "--parallelism-config-tp-size", "2"],
        ["--use-deepspeed", "--num-processes", "2"],
        ["--cpu", "--mixed-precision", "fp8", "--fp8-backend", "te"],
    ],
)
@requires("engine:fsdp", "engine:deepspeed")
def test_a_run_may_start_another_one(settings, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """What a launch tells its processes, a launch inside of them reads, and tells its own processes the same."""
    outer = child_environment(settings(*words, "s.py"))
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    inner = child_environment(settings("s.py"))
    engines = {name for name in outer if name.startswith("ACCELERATE_")}
    assert {name: inner[name] for name in engines} == {name: outer[name] for name in engines}
