"""The questions about one's own machines, in their order."""

from accel_launch.questions.question import Answers, Question, When, from_setting
from accel_launch.settings.devices import SEVERAL_DEVICES
from accel_launch.settings.table import BY_KEY

__all__ = ["CLUSTER", "ENVIRONMENT"]

_YES_NO = ("no", "yes")
_GPU_TYPES = {f"several {label.removeprefix('MULTI_')}s": label for label in SEVERAL_DEVICES}
_MACHINES = ("this machine, one process", "several CPU processes", *_GPU_TYPES, "TPU")

ENVIRONMENT = Question(
    "compute_environment",
    "Where does the run take place?",
    ("LOCAL_MACHINE", "AMAZON_SAGEMAKER"),
    "LOCAL_MACHINE",
    path=("compute_environment",),
)
"""The first question, which decides about all others."""


def _several(answers: Answers) -> bool:
    return bool(answers["kind"] != _MACHINES[0])


def _gpus(answers: Answers) -> bool:
    return answers["kind"] in _GPU_TYPES


def _machines(answers: Answers) -> bool:
    return int(answers.get("num_machines") or 1) > 1


def _own_deepspeed_file(answers: Answers) -> bool:
    return _answered(_DEEPSPEED, ("own_deepspeed_file", "yes"))(answers)


def _deepspeed_machines(answers: Answers) -> bool:
    return _answered(_DEEPSPEED)(answers) and _machines(answers)


def _reached_by_deepspeed(answers: Answers) -> bool:
    return _deepspeed_machines(answers) and answers.get("deepspeed_multinode_launcher") != "standard"


def _without_inclusion(answers: Answers) -> bool:
    return _reached_by_deepspeed(answers) and not answers.get("deepspeed_inclusion_filter")


def _answered(*wanted: tuple[str, str]) -> When:
    """Return a condition: that earlier answers are these, by the key of their question."""
    return lambda answers: all(str(answers.get(key)) == value for key, value in wanted)


_DEEPSPEED, _FSDP, _MEGATRON = (("engine", name) for name in ("DeepSpeed", "FSDP", "Megatron-LM"))
_FSDP2 = (_FSDP, ("fsdp_version", "2"))


def _from(key: str, when: When, *, text: str = "", default: str | None = None, optional: bool = False) -> Question:
    return from_setting(BY_KEY[key], when, text=text, default=default, optional=optional)


def _rows(engine: str, *wanted: tuple[str, str]) -> tuple[Question, ...]:
    """Return the questions of an engine, from the rows of its options."""
    found = []
    for setting in BY_KEY.values():
        asked = setting.option.asked if setting.option is not None and setting.engine == engine else None
        if asked is not None:
            when = _answered(*wanted, *asked.when)
            found.append(_from(setting.key, when, text=asked.text, default=asked.default, optional=asked.optional))
    return tuple(found)


CLUSTER: tuple[Question, ...] = (
    Question("kind", "What does the run use?", _MACHINES, _MACHINES[0]),
    _from("num_machines", _several, text="How many machines take part?", default="1"),
    _from("machine_rank", _machines, text="Which number has this machine, from 0?", default="0"),
    _from("main_process_ip", _machines, text="What is the address of machine 0?"),
    _from("main_process_port", _machines, text="Which port of machine 0 may be used?", default="29500"),
    _from("same_network", _machines, text="Are all machines in one local network?", default="yes"),
    _from("rdzv_backend", _machines, text="How do the machines find one another?"),
    _from("debug", _several, text="Check operations across ranks, which is slower?"),
    Question("compile", "Compile models with torch.compile?", _YES_NO, "no"),
    *_rows("dynamo", ("compile", "yes")),
    Question(
        "engine",
        "Which engine trains?",
        ("none", "DeepSpeed", "FSDP", "Megatron-LM"),
        "none",
        when=lambda answers: _gpus(answers) or answers["kind"] == "several CPU processes",
    ),
    Question("own_deepspeed_file", "Is there a DeepSpeed JSON file?", _YES_NO, "no", when=_answered(_DEEPSPEED)),
    *_rows("deepspeed", _DEEPSPEED),
    _from("deepspeed_multinode_launcher", _deepspeed_machines, default="pdsh"),
    _from("deepspeed_hostfile", _reached_by_deepspeed),
    _from("deepspeed_inclusion_filter", _reached_by_deepspeed, optional=True),
    _from("deepspeed_exclusion_filter", _without_inclusion, optional=True),
    *_rows("fsdp", _FSDP),
    Question("several_axes", "Lay the ranks out on several mesh axes?", _YES_NO, "no", when=_answered(*_FSDP2)),
    *_rows("parallelism", *_FSDP2, ("several_axes", "yes")),
    *_rows("megatron", _MEGATRON),
    _from("num_processes", _several, text="How many processes over all machines?", default="2"),
    _from("gpu_ids", _gpus, text="Which GPUs, as comma-separated numbers?", default="all"),
    _from("enable_cpu_affinity", _gpus, default="no"),
    _from(
        "mpirun_hostfile",
        lambda answers: answers["kind"] == "several CPU processes",
        text="Start with mpirun over which hostfile? (empty: without mpirun)",
        optional=True,
    ),
    _from("main_training_function", lambda answers: answers["kind"] == "TPU", default="main"),
    _from("tpu_use_cluster", lambda answers: answers["kind"] == "TPU", text="Use a whole TPU pod?", default="no"),
    Question(
        "tpu_name",
        "What is the pod's name?",
        when=lambda answers: bool(answers.get("tpu_use_cluster")),
        path=("tpu_name",),
    ),
    Question(
        "tpu_zone",
        "In which zone is it?",
        when=lambda answers: bool(answers.get("tpu_use_cluster")),
        path=("tpu_zone",),
        optional=True,
    ),
    _from("tpu_use_sudo", lambda answers: bool(answers.get("tpu_use_cluster")), default="no"),
    Question(
        "use_cpu",
        "Train on the CPU, even where there is a GPU?",
        _YES_NO,
        "no",
        parse=lambda said: said == "yes",
        when=lambda answers: answers["kind"] == _MACHINES[0],
        path=("use_cpu",),
    ),
    _from("mixed_precision", lambda answers: not _own_deepspeed_file(answers), default="no"),
    *_rows("fp8", ("mixed_precision", "fp8")),
    _from(
        "downcast_bf16",
        lambda answers: answers["kind"] == "TPU" and answers.get("mixed_precision") == "bf16",
        default="no",
    ),
)
"""Questions about one's own machines."""

TYPE_OF_KIND = {_MACHINES[0]: "NO", "several CPU processes": "MULTI_CPU", "TPU": "XLA", **_GPU_TYPES}
TYPE_OF_ENGINE = {"DeepSpeed": "DEEPSPEED", "FSDP": "FSDP", "Megatron-LM": "MEGATRON_LM"}
