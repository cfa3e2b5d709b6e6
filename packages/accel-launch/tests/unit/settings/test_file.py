"""Configuration files: read with their lines, migrated, and refused with a hint."""

import json
from pathlib import Path

import pytest

from accel_core.errors import ConfigurationError
from accel_launch.settings.child import child_environment
from accel_launch.settings.config import ClusterConfig, load_config_from_file, write_basic_config
from accel_launch.settings.file import ConfigFile, load, write
from accel_testing import requires


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("use_cpu: true\nnum_processors: 2\n", r":2: unknown key `num_processors`. Did you mean `num_processes`"),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_offload_param: true\n",
            r":4: unknown key `fsdp_config.fsdp_offload_param`. Did you mean `fsdp_config|fsdp_offload_params`",
        ),
        ("use_cpu: [true\n", "neither YAML nor JSON"),
        ("- a\n- b\n", "holds a list"),
        ("fsdp_config: 3\n", "groups settings"),
        ("distributed_type: MULTI_GPUS\n", "Did you mean MULTI_GPU"),
        ("num_processes: many\n", "got 'many' from .*config.yaml:1"),
        ("mixed_precision: fp7\n", "Give it one of no, fp16, bf16, fp8"),
        (
            "use_cpu: true\nfsdp_config: {fsdp_reshard_after_forward: FULL_SHARD, fsdp_sharding_strategy: 2}\n",
            "got 'FULL_SHARD' from .*:2",
        ),
        ("use_cpu: true\nmixed_precision: bf16\nuse_cpu: false\n", ":3: `use_cpu` is said twice, .* in line 1"),
        ("fsdp_config:\n  fsdp_version: 1\n  fsdp_version: 2\n", ":3: `fsdp_version` is said twice, .* in line 2"),
    ],
)
@requires("engine:fsdp")
def test_file_that_is_not_valid(tmp_path: Path, text: str, told: str) -> None:
    """What is not valid is an error with file, line and a hint."""
    with pytest.raises(ConfigurationError, match=told) as caught:
        loaded(tmp_path, text).settings_of(set())
    assert "config.yaml" in str(caught.value)


def loaded(folder: Path, text: str) -> ConfigFile:
    """Write a file, and read it."""
    (folder / "config.yaml").write_text(text)
    file = load(folder / "config.yaml")
    assert file is not None
    return file


def test_missing_file_is_told(tmp_path: Path) -> None:
    """A file that was named and is not there is an error, never the default one."""
    with pytest.raises(ConfigurationError, match="does not exist"):
        load(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("old", "today"),
    [
        ({"fp16": True}, {"mixed_precision": "fp16"}),
        ({"fp16": False}, {"mixed_precision": "no"}),
        ({"distributed_type": "TPU"}, {"distributed_type": "XLA"}),
        ({"dynamo_backend": "INDUCTOR"}, {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}),
        (
            {"fsdp_config": {"fsdp_sharding_strategy": 2, "fsdp_backward_prefetch_policy": "BACKWARD_PRE"}},
            {"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_backward_prefetch": "BACKWARD_PRE"}},
        ),
        ({"fsdp_config": {"version": 2}}, {"fsdp_config": {"fsdp_version": 2}}),
        (
            {"fsdp_config": {"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}},
            {"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}},
        ),
        ({"ipex_config": {"ipex": True}}, {}),
    ],
)
@requires("engine:fsdp")
def test_old_keys_become_todays(tmp_path: Path, old: dict, today: dict) -> None:
    """Keys and values of earlier days are migrated, and the file tells so."""
    file = loaded(tmp_path, json.dumps(old))
    assert file.config == today
    assert file.is_old


def test_a_key_that_says_the_same_twice_is_read(tmp_path: Path) -> None:
    """A line that was copied contradicts nothing, and neither does a key beside the aliases that it overrides."""
    text = "debug: false\n<<: {use_cpu: true}\nuse_cpu: false\ndebug: false\ndynamo_config: {}\ndynamo_config: {}\n"
    assert loaded(tmp_path, text).config == {"use_cpu": False, "debug": False, "dynamo_config": {}}


@requires("engine:deepspeed")
def test_auto_is_left_to_the_processes(tmp_path: Path) -> None:
    """Many files for DeepSpeed say what its default is; a launch has nothing to decide then."""
    text = "deepspeed_config: {gradient_accumulation_steps: auto, gradient_clipping: auto, zero_stage: 3}\n"
    assert loaded(tmp_path, text).settings_of(set()).keys() == {"zero_stage"}


@pytest.mark.parametrize("name", ["config.yaml", "config.json"])
@requires("engine:fsdp")
def test_written_file_reads_back(tmp_path: Path, name: str) -> None:
    """YAML and JSON that accel writes say the same when they are read."""
    config = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
    write(config, tmp_path / name)
    file = load(tmp_path / name)
    assert file is not None
    assert {key: value for key, value in file.config.items() if key != "schema"} == config
    said = file.settings_of(set())
    assert (said["use_fsdp"].value, said["fsdp_version"].value) == (True, "2")


@pytest.mark.parametrize(("gpus", "kind"), [(0, "NO"), (1, "NO"), (8, "MULTI_GPU")])
def test_basic_config_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, kind: str) -> None:
    """The usual configuration of the GPUs that are here is written, read back as an object, and never overwritten."""
    monkeypatch.setattr("accel_launch.settings.devices._present", lambda: gpus)
    path = tmp_path / "home" / "config.yaml"
    assert write_basic_config("bf16", str(path)) == path
    config = load_config_from_file(path)
    assert isinstance(config, ClusterConfig)
    assert (config.mixed_precision, config.num_processes, config.use_cpu) == ("bf16", max(1, gpus), not gpus)
    assert config.distributed_type == kind
    before = path.read_bytes()
    assert write_basic_config("no", str(path)) is False
    assert path.read_bytes() == before
    with pytest.raises(ConfigurationError, match="fp64"):
        write_basic_config("fp64", str(tmp_path / "other.yaml"))
    assert not (tmp_path / "other.yaml").exists()


def test_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """A home that cannot be written gives a message with the path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        write({}, tmp_path / "file" / "config.yaml")


def test_devices_of_each_kind_are_chosen_by_their_own_variable(settings, tmp_path: Path) -> None:
    """gpu_ids of a file reach the processes in the variable of the file's kind of device, and of GPUs by default."""
    script = str(tmp_path / "s.py")
    found = {}
    for label in ("MULTI_NPU", "MULTI_GPU", "NO"):
        path = tmp_path / "c.yaml"
        path.write_text(f"distributed_type: {label!r}\nnum_processes: 2\ngpu_ids: 1,2\n")
        found[label] = child_environment(settings("--config-file", str(path), script))
    assert found["MULTI_NPU"]["ASCEND_RT_VISIBLE_DEVICES"] == "1,2"
    assert "CUDA_VISIBLE_DEVICES" not in found["MULTI_NPU"]
    assert [found[label]["CUDA_VISIBLE_DEVICES"] for label in ("MULTI_GPU", "NO")] == ["1,2"] * 2


@pytest.mark.parametrize(
    ("text", "words", "processes"),
    [
        ("distributed_type: 'NO'\nnum_processes: 8\n", [], 1),
        ("distributed_type: NO\nnum_processes: 8\nuse_cpu: true\n", [], 1),
        ("distributed_type: NO\nnum_processes: 8\nnum_machines: 1\n", ["--cpu"], 1),
        ("distributed_type: NO\n", [], 1),
        ("distributed_type: NO\nnum_processes: 8\n", ["--num-processes=2"], 2),
        ("distributed_type: NO\nnum_processes: 8\n", ["--nproc-per-node=8"], 8),
        ("distributed_type: NO\nnum_processes: 8\n", ["--multi-gpu"], 8),
        ("num_processes: 8\n", [], 8),
    ],
)
def test_file_of_type_no_starts_one_process(
    settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: list[str], processes: int
) -> None:
    """NO, also as YAML's false, is one process as in Accelerate, unless the command line says how many or on what."""
    monkeypatch.setattr("accel_launch.settings.devices._present", lambda: 4)
    (tmp_path / "c.yaml").write_text(text)
    assert settings("--config-file", str(tmp_path / "c.yaml"), *words, "s.py").layout.processes == processes


def test_words_in_capitals_mean_the_same(settings, tmp_path: Path) -> None:
    """A file that says FP8 sets up what one that says fp8 does, its options included."""
    told = []
    for word in ("FP8", "fp8"):
        path = tmp_path / "config.yaml"
        path.write_text(f"mixed_precision: {word}\nuse_cpu: true\nfp8_config:\n  backend: TE\n  margin: 3\n")
        told.append(child_environment(settings("--config-file", str(path), "s.py")))
    assert told[0] == told[1]
    assert told[1]["ACCELERATE_FP8_MARGIN"] == "3"
