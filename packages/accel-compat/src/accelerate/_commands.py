"""The programs of Accelerate over those of accel-launch, and the constants of their modules."""

import argparse
import sys
from collections.abc import Callable

from accel_launch import cli
from accel_launch.settings.location import config_folder
from accelerate._version import __version__

version = __version__.partition("+")[0]  # as `accelerate.__version__`

cache_dir = str(config_folder())
hf_cache_home = str(config_folder().parent)
default_yaml_config_file = f"{cache_dir}/default_config.yaml"
# There is one default file, and a name for whoever asks for the other.
default_json_config_file = default_yaml_config_file
default_config_file = default_yaml_config_file

DYNAMO_BACKENDS = [
    "EAGER",
    "AOT_EAGER",
    "INDUCTOR",
    "AOT_TS_NVFUSER",
    "NVPRIMS_NVFUSER",
    "CUDAGRAPHS",
    "OFI",
    "FX2TRT",
    "ONNXRT",
    "TENSORRT",
    "AOT_TORCHXLA_TRACE_ONCE",
    "TORHCHXLA_TRACE_ONCE",  # spelled so in Accelerate, and looked up by that
    "TVM",
]

options_to_group = {
    "multi_gpu": "Distributed GPUs",
    "tpu": "TPU",
    "use_deepspeed": "DeepSpeed Arguments",
    "use_fsdp": "FSDP Arguments",
    "use_megatron_lm": "Megatron-LM Arguments",
    "fp8_backend": "FP8 Arguments",
}


config_description = "Ask about machines and engines, and write the answers into a configuration file."
default_description = "Write a configuration file with the usual settings of this machine."
update_description = "Bring a configuration file up to date; what it says stays."
merge_description = "Join the shards of a model into files with whole weights."


class SubcommandHelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Lays out the help of a command with others below it: lines of descriptions stay as they are."""


def clean_option(option: str) -> str | None:
    """Return the key of a long flag, in underscores; `None` for a short one."""
    return option[2:].replace("-", "_") if option.startswith("--") else None


def main() -> int:
    """Run the program `accelerate` with the words of this process, and return its exit status."""
    # The drop-in's version; below, it would be that of accel-launch.
    if sys.argv[1:2] in (["-V"], ["--version"], ["version"]):
        print(f"accelerate {__version__}")  # noqa: T201  what was asked for
        return 0
    return _run(sys.argv[1:])


def _run(words: list[str]) -> int:
    return cli.main(words, program="accelerate")


def _program(word: str) -> Callable[[], int]:
    def run() -> int:
        return _run([word, *sys.argv[1:]])

    run.__doc__ = f"Run `accelerate {word}` with the words of this process, and return its exit status."
    return run


main_config = _program("config")
main_env = _program("env")
main_estimate = _program("estimate-memory")
main_launch = _program("launch")
main_merge = _program("merge-weights")
main_test = _program("test")
main_tpu = _program("tpu-config")
