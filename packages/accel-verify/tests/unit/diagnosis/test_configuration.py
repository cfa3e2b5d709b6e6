"""The configuration file, and what it and the environment say together."""

import socket
from pathlib import Path

import pytest

from accel_testing import requires
from accel_verify.diagnosis.configuration import check_configuration
from accel_verify.diagnosis.examine import settings_of


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the machine's own configuration aside."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


def test_no_file_is_fine() -> None:
    """Without a file defaults apply."""
    assert [(each.state, each.what) for each in check_configuration(None, settings_of)] == [
        ("ok", "no configuration file; defaults apply"),
        ("ok", "settings of file and environment go together"),
    ]


def test_the_file_of_the_variable_is_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch reads what ACCEL_CONFIG_FILE names, so its old keys are told."""
    (tmp_path / "c.yaml").write_text("fp16: true\n")
    monkeypatch.setenv("ACCEL_CONFIG_FILE", str(tmp_path / "c.yaml"))
    states = [(each.state, each.what) for each in check_configuration(None, settings_of)]
    assert states[0] == ("ok", f"{tmp_path / 'c.yaml'} can be read")
    assert ("warning", f"{tmp_path / 'c.yaml'} has keys or values of older versions") in states


@pytest.mark.parametrize(
    ("text", "what", "remedy"),
    [
        ("num_processors: 2\n", "{path}:1: unknown key `num_processors`", "Did you mean `num_processes`?"),
        (
            "num_processes: many\n",
            "num_processes is not valid; got 'many' from {path}:1",
            "Give it a whole number from 1.",
        ),
        (None, "The configuration file {path} does not exist", "Name one that does"),
    ],
)
def test_a_file_that_does_not_hold(tmp_path: Path, text: str | None, what: str, remedy: str) -> None:
    """A file that is missing or has a key or a value that is wrong is a problem with its place and remedy."""
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    [found] = check_configuration(str(path), settings_of)
    assert (found.state, found.what) == ("problem", what.format(path=path))
    assert found.remedy.startswith(remedy)


@requires("engine:fsdp", "engine:deepspeed")
def test_a_variable_that_contradicts_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File and environment are examined together, as a launch would read them."""
    path = tmp_path / "config.yaml"
    path.write_text("distributed_type: FSDP\n")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    [found] = check_configuration(str(path), settings_of)
    assert found.what.startswith(
        "These settings exclude each other; got use_deepspeed from ACCELERATE_USE_DEEPSPEED and"
    )
    assert (found.state, found.remedy) == ("problem", "Leave one out.")


def test_a_port_of_the_file_that_is_taken(tmp_path: Path) -> None:
    """The port at which processes would meet is tried."""
    path = tmp_path / "config.yaml"
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        path.write_text(f"num_processes: 2\nmain_process_port: {port}\n")
        *_, found = check_configuration(str(path), settings_of)
    assert (found.state, found.what) == ("problem", f"port {port} from {path}:2 is taken")
