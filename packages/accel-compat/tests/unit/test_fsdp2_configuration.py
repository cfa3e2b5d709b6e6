"""The command that turns configurations for FSDP1 into ones for FSDP2."""

from pathlib import Path

import pytest
import yaml

from accel_core.errors import ConfigurationError
from accelerate import _commands
from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2, load_config

FIRST = {
    "distributed_type": "FSDP",
    "num_processes": 2,
    "fsdp_config": {
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_use_orig_params": True,
        "fsdp_forward_prefetch": True,
    },
}
SECOND = {"fsdp_reshard_after_forward": False, "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_version": 2}


def test_keys_and_values_become_fsdp2s(caplog: pytest.LogCaptureFixture) -> None:
    """A strategy becomes whether parameters are sharded again; each key that has no counterpart is warned of."""
    converted = convert_config_to_fsdp2(FIRST)
    assert converted == {**FIRST, "fsdp_config": SECOND}
    left_out = ["fsdp_use_orig_params", "fsdp_forward_prefetch"]
    assert [record.getMessage().split()[0] for record in caplog.records] == left_out


@pytest.mark.parametrize(("strategy", "reshards"), [("HYBRID_SHARD", True), ("HYBRID_SHARD_ZERO2", False)])
def test_copies_of_shards_become_a_mesh(strategy: str, reshards: bool) -> None:
    """A hybrid strategy becomes copies for each machine of shards in it; sizes that the file has already stay."""
    machines = {"num_machines": 2, "num_processes": 8, "fsdp_config": {"fsdp_sharding_strategy": strategy}}
    converted = convert_config_to_fsdp2(machines)
    assert converted["fsdp_config"] == {"fsdp_reshard_after_forward": reshards, "fsdp_version": 2}
    sizes = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}
    assert converted["parallelism_config"] == sizes
    own = {"parallelism_config_dp_replicate_size": 4}
    assert convert_config_to_fsdp2({**machines, "parallelism_config": own})["parallelism_config"] == own
    assert "parallelism_config" not in convert_config_to_fsdp2({**machines, "num_machines": 1})
    with pytest.raises(ConfigurationError, match=r"got num_processes=7 and num_machines=2"):
        convert_config_to_fsdp2({**machines, "num_processes": 7})


def test_what_is_not_sharded_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """FSDP2 always shards, so whole copies are named in a warning."""
    section = convert_config_to_fsdp2({"fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}})["fsdp_config"]
    assert section == {"fsdp_reshard_after_forward": False, "fsdp_version": 2}
    assert "NO_SHARD" in caplog.text


@pytest.mark.parametrize("config", [{"distributed_type": "NO"}, {"fsdp_config": {"fsdp_version": 2}}])
def test_what_is_not_for_fsdp1_is_left(config: dict[str, object]) -> None:
    """Configurations without FSDP, or for FSDP2, come back as they are."""
    assert convert_config_to_fsdp2(config) is config


def test_the_command_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command writes to the place that is named, and over a file only where that is said."""
    source, target = tmp_path / "first.yaml", tmp_path / "second.yaml"
    source.write_text(yaml.safe_dump(FIRST))
    words = ["to-fsdp2", "--config_file", str(source)]
    assert _commands._run(words) == 2
    assert "exists" in capsys.readouterr().err
    assert yaml.safe_load(source.read_text()) == FIRST
    assert _commands._run([*words, "--output-file", str(target)]) == 0
    assert load_config(str(target))["fsdp_config"] == SECOND
    assert _commands._run([*words, "--overwrite"]) == 0
    assert source.read_text() == target.read_text()


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is not there is an error of one line with its name."""
    assert _commands._run(["to-fsdp2", "--config_file", str(tmp_path / "none.yaml"), "--overwrite"]) == 2
    assert "none.yaml" in capsys.readouterr().err


def test_a_folder_of_files_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every configuration in a folder is converted, or none where one of them cannot be; an empty folder is named."""
    source, target = tmp_path / "first", tmp_path / "second"
    source.mkdir()
    words = ["to-fsdp2", "--config_file", str(source), "--output_file", str(target)]
    assert _commands._run(words) == 2
    assert "no configuration to convert" in capsys.readouterr().err
    for name in ("a.yaml", "b.yml"):
        (source / name).write_text(yaml.safe_dump(FIRST))
    (source / "c.json").write_text("{")
    (source / "notes.txt").write_text("not a configuration")
    assert _commands._run(words) == 2
    assert not target.exists()
    (source / "c.json").unlink()
    assert _commands._run(words) == 0
    assert sorted(path.name for path in target.iterdir()) == ["a.yaml", "b.yml"]
    assert load_config(str(target / "b.yml"))["fsdp_config"] == SECOND
    assert _commands._run(words) == 2
    assert "a.yaml" in capsys.readouterr().err
    assert _commands._run([*words, "--overwrite"]) == 0
