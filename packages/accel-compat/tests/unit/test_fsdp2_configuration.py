"""The command that turns configurations for FSDP1 into ones for FSDP2."""

from pathlib import Path

import pytest
import yaml

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


def test_another_way_of_sharding_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Hybrid sharding is a matter of the mesh in FSDP2, which the configuration then has to name."""
    section = convert_config_to_fsdp2({"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}})["fsdp_config"]
    assert section == {"fsdp_reshard_after_forward": True, "fsdp_version": 2}
    assert "HYBRID_SHARD" in caplog.text


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
