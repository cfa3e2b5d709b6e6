"""The program itself: its list of commands, its messages, and how little it imports."""

import subprocess
import sys
from pathlib import Path

import pytest

import accel_launch
from accel_launch.cli import BUILT_IN


def test_overview_lists_every_command(command) -> None:
    """`accel --help` names every built-in command."""
    shown = command("--help").out
    assert all(name in shown for name in BUILT_IN)


@pytest.mark.parametrize("words", [["--help"], ["launch", "--help"]], ids=" ".join)
def test_help_imports_neither_torch_nor_rich(words: list[str]) -> None:
    """Help is shown without torch, rich, yaml or a look at entry points."""
    heavy = ("torch", "rich", "yaml", "questionary", "importlib.metadata", "numpy")
    code = (
        "import sys; from accel_launch.cli import main\n"
        f"try: main({words!r})\nexcept SystemExit: pass\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_short_help_of_launch_fits_a_screen(command, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-h` has at most 45 lines of 80 columns, with four examples; each of its options is one of `--help`."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = command("launch", "-h").out.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("  accel launch ") for line in lines) == 4
    flags = {word.strip(",") for line in lines[10:] for word in line.split()[:2] if word.startswith("-")}
    everything = command("launch", "--help").out
    assert len(flags) > 20
    assert not [flag for flag in flags if f" {flag}" not in everything]


@pytest.mark.parametrize("words", [["launch", "--help", "Compilation"], ["help", "launch", "dynamo"]], ids=" ".join)
def test_help_of_a_topic_is_its_options_alone(command, words: list[str]) -> None:
    """A topic or an engine is shown by its name, with no compiler that torch no longer has."""
    shown = command(*words).out
    assert shown.startswith("Compilation:\n  --dynamo-backend {no,eager,")
    assert "--num-processes" not in shown
    assert "nvfuser" not in shown
    assert "no options about 'cooking'; topics are hardware, " in command(*words[:-1], "cooking", status=2).err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["launch", "--mixed-precision", "bf61", "s.py"],
            "got 'bf61'. Did you mean bf16? Give it one of no, fp16, bf16, fp8.",
        ),
        (
            ["launch", "--dynamo-backend", "INDUCTR", "s.py"],
            "got 'INDUCTR'. Did you mean inductor? Give it one of no, eager, ",
        ),
        (["launch", "--num_processes", "many", "s.py"], "got 'many'. Give it a whole number from 1."),
        (["launch", "--num-processes", "many", "s.py"], "got 'many'. Give it a whole number from 1."),
        (["launch", "--num-proceses", "2", "s.py"], "Did you mean --num-processes?"),
        (["launch", "--mixed_precison=bf16", "s.py"], "Did you mean --mixed-precision?"),
        (["config", "default", "--mixed-precison", "bf16"], "Did you mean --mixed-precision?"),
        (["completion", "tcsh"], "invalid choice: 'tcsh'"),
    ],
)
def test_wrong_word_is_named_with_the_nearest(command, words: list[str], message: str) -> None:
    """A value or an option that is unknown, in either spelling, ends with status 2 and what was probably meant."""
    assert message in command(*words, status=2).err


def test_every_command_has_two_examples(command) -> None:
    """The help of a command ends with its examples, also those of commands that other packages bring."""
    lines = Path(accel_launch.__path__[0], "examples.txt").read_text().splitlines()
    for name in BUILT_IN:
        assert sum(f"{line} ".startswith(f"accel {name} ") for line in lines) > 1, name
    for word in ("-h", "--help"):
        assert "Examples:\n  accel env  " in command("env", word).out


def test_help_of_launch_is_the_short_one(command) -> None:
    """`accel help launch` shows what `-h` does; the long help offers each topic once."""
    shown = [command(*words).out for words in (["help", "launch"], ["launch", "-h"], ["launch", "--help"])]
    assert shown[0] == shown[1] != shown[2]
    offered = " ".join(shown[2].split()).partition("of a topic: ")[2].partition(";")[0]
    assert "compilation" in offered
    assert "dynamo" not in offered


def test_unknown_command_is_told_with_the_nearest(command) -> None:
    """A misspelled command ends with status 2 and the word that was probably meant."""
    assert "Did you mean `accel launch`?" in command("lunch", status=2).err


@pytest.mark.parametrize(
    ("word", "package"),
    [("verify-parallel", "accel-verify"), ("check_resume", "accel-verify"), ("doctor", "accel-verify"),
     ("plan", "accel-plan"), ("trackers", "accel-trackers")],
)  # fmt: skip
def test_a_command_of_a_package_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, command, word: str, package: str
) -> None:
    """It ends with status 2 and one line that names the package to install; the overview says where it comes from."""
    places = [place for place in sys.path if not list(Path(place or ".").glob("accel_*.dist-info"))]
    monkeypatch.setattr(sys, "path", places)
    printed = command(word, status=2)
    assert not printed.out
    (line,) = printed.err.splitlines()
    assert line.endswith(f"comes with {package}, which is not installed. Run: pip install {package}")
    (listed,) = [each for each in command("--help").out.splitlines() if each.split()[:1] == [word.replace("_", "-")]]
    assert listed.endswith(f"({package})")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothere.py"], "The script does not exist"),
        (["--num-processes", "0", "train.py"], "got '0' from --num-processes"),
        (["--gpu-ids", "0,0", "train.py"], "each once"),
        (["--num-processes", "3", "--num-machines", "2", "train.py"], "spread evenly"),
        (["--nproc-per-node", "2", "--num-processes", "3", "train.py"], "contradict"),
        (["--machine-rank", "1", "train.py"], "got 1 from --machine-rank for 1 machine. Give it 0."),
        (["--nnodes", "2:1", "train.py"], "got '2:1' from --nnodes"),
        (["-m", "--no-python", "train.py"], "contradict"),
        (["--tee", "7", "train.py"], "got '7' from --tee"),
        (["."], "folder without a __main__.py"),
        (["bad.yaml"], "got 'bad.yaml'. Write --config-file before a configuration"),
        ([], "No script was given"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_impossible_words_start_nothing(
    script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command, words: list[str], message: str
) -> None:
    """What is not valid ends with status 2 and a message, and the script does not run."""
    script("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert message in command("launch", "--cpu", *words, status=2).err
    assert not (tmp_path / "ran").exists()


def test_home_that_cannot_be_used(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command) -> None:
    """A home that cannot be read or written stops no launch; writing a file there is an error with its path."""
    script("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", "/dev/null/home")
    command("launch", "--cpu", "--dry-run", "train.py")
    assert "/dev/null/home/accelerate/default_config.yaml gives" in command("config", "default", status=2).err


def test_usage_is_said_once(command) -> None:
    """The help of a sub-command begins with its usage."""
    assert command("config", "default", "--help").out.startswith("Usage: accel config default [options]\n")


def test_command_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command) -> None:
    """A module that another distribution offers is listed, named where the shell completes, and run."""
    (tmp_path / "theirs-1.dist-info").mkdir()
    (tmp_path / "theirs-1.dist-info" / "METADATA").write_text("Name: theirs\nVersion: 1\n")
    points = "[console_scripts]\na = b:c\n\n[accel.commands]\nweigh-all = accel_theirs\n\n[other]\nd = e\n"
    (tmp_path / "theirs-1.dist-info" / "entry_points.txt").write_text(points)
    (tmp_path / "accel_theirs.py").write_text(
        "name = 'weigh-all'\nhelp = 'Weigh all.'\nrun = 'accel_theirs:go'\n"
        "def add_arguments(parser):\n    parser.add_argument('--some-thing', default='x')\n"
        "def go(args):\n    print('weighed', args.some_thing)\n    return 5\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    printed = []
    for words, status in (
        (["--help"], 0),
        (["completion", "--words", "wei"], 0),
        (["weigh-all", "--some_thing", "y"], 5),
    ):
        printed.append(command(*words, status=status).out)
    sys.modules.pop("accel_theirs", None)
    assert "Of other packages:\n  weigh-all\n" in printed[0]
    assert printed[1:] == ["weigh-all\n", "weighed y\n"]
