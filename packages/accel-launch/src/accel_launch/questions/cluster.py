"""The questions about one's own machines, in their order."""

from accel_launch.questions.question import Answers, Question, from_setting
from accel_launch.settings.table import BY_KEY

__all__ = ["CLUSTER", "ENVIRONMENT"]

_YES_NO = ("no", "yes")
_GPU_TYPES = {
    "several GPUs": "MULTI_GPU",
    "several NPUs": "MULTI_NPU",
    "several MLUs": "MULTI_MLU",
    "several SDAAs": "MULTI_SDAA",
    "several MUSAs": "MULTI_MUSA",
    "several XPUs": "MULTI_XPU",
    "several HPUs": "MULTI_HPU",
}
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


def _engine(name: str) -> "_Engine":
    return _Engine(name)


class _Engine:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, answers: Answers) -> bool:
        return answers.get("engine") == self._name

    def with_version(self, version: str) -> "_Version":
        return _Version(self, version)


class _Version:
    def __init__(self, engine: _Engine, version: str) -> None:
        self._engine = engine
        self._version = version

    def __call__(self, answers: Answers) -> bool:
        return self._engine(answers) and answers.get("fsdp_version") == self._version


_fsdp, _deepspeed, _megatron = _engine("FSDP"), _engine("DeepSpeed"), _engine("Megatron-LM")
_fsdp1, _fsdp2 = _fsdp.with_version("1"), _fsdp.with_version("2")


def _own_deepspeed_file(answers: Answers) -> bool:
    return _deepspeed(answers) and answers.get("own_deepspeed_file") == "yes"


def _asked_deepspeed(answers: Answers) -> bool:
    return _deepspeed(answers) and answers.get("own_deepspeed_file") == "no"


def _wraps_by_class(answers: Answers) -> bool:
    return _fsdp(answers) and answers.get("fsdp_auto_wrap_policy") == "TRANSFORMER_BASED_WRAP"


def _axes(answers: Answers) -> bool:
    return _fsdp2(answers) and answers.get("several_axes") == "yes"


def _from(key: str, when: object, **more: object) -> Question:
    return from_setting(BY_KEY[key], when, **more)  # type: ignore[arg-type]


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
    _from("dynamo_backend", lambda answers: answers["compile"] == "yes", default="inductor"),
    _from("dynamo_mode", lambda answers: answers["compile"] == "yes"),
    _from("dynamo_use_fullgraph", lambda answers: answers["compile"] == "yes"),
    _from("dynamo_use_dynamic", lambda answers: answers["compile"] == "yes"),
    _from("dynamo_use_regional_compilation", lambda answers: answers["compile"] == "yes"),
    Question(
        "engine",
        "Which engine trains?",
        ("none", "DeepSpeed", "FSDP", "Megatron-LM"),
        "none",
        when=lambda answers: _gpus(answers) or answers["kind"] == "several CPU processes",
    ),
    Question("own_deepspeed_file", "Is there a DeepSpeed JSON file?", _YES_NO, "no", when=_deepspeed),
    _from("deepspeed_config_file", _own_deepspeed_file),
    _from("zero_stage", _asked_deepspeed, default="2"),
    _from("offload_optimizer_device", _asked_deepspeed, default="none"),
    _from("offload_param_device", _asked_deepspeed, default="none"),
    _from("gradient_accumulation_steps", _asked_deepspeed, default="1", text="Batches per optimizer step?"),
    _from("gradient_clipping", _asked_deepspeed, optional=True, text="Clip gradients at which norm? (empty: not)"),
    _from("zero3_save_16bit_model", _asked_deepspeed, default="no"),
    _from("zero3_init_flag", _deepspeed, default="no"),
    _from("deepspeed_hostfile", lambda answers: _deepspeed(answers) and _machines(answers), optional=True),
    _from("deepspeed_multinode_launcher", lambda answers: _deepspeed(answers) and _machines(answers), default="pdsh"),
    _from("fsdp_version", _fsdp, default="2"),
    _from("fsdp_sharding_strategy", _fsdp1),
    _from("fsdp_reshard_after_forward", _fsdp2),
    _from("fsdp_offload_params", _fsdp),
    _from("fsdp_auto_wrap_policy", _fsdp, default="TRANSFORMER_BASED_WRAP"),
    _from("fsdp_transformer_layer_cls_to_wrap", _wraps_by_class, optional=True),
    _from(
        "fsdp_min_num_params",
        lambda answers: _fsdp(answers) and answers.get("fsdp_auto_wrap_policy") == "SIZE_BASED_WRAP",
    ),
    _from("fsdp_backward_prefetch", _fsdp1, default="BACKWARD_PRE"),
    _from("fsdp_state_dict_type", _fsdp, default="SHARDED_STATE_DICT"),
    _from("fsdp_forward_prefetch", _fsdp1),
    _from("fsdp_use_orig_params", _fsdp1),
    _from("fsdp_cpu_ram_efficient_loading", _fsdp),
    _from("fsdp_sync_module_states", _fsdp1),
    _from("fsdp_activation_checkpointing", _fsdp),
    Question("several_axes", "Lay the ranks out on several mesh axes?", _YES_NO, "no", when=_fsdp2),
    _from("parallelism_config_dp_replicate_size", _axes),
    _from("parallelism_config_dp_shard_size", _axes),
    _from("parallelism_config_tp_size", _axes),
    _from("parallelism_config_cp_size", _axes),
    _from("megatron_lm_tp_degree", _megatron),
    _from("megatron_lm_pp_degree", _megatron),
    _from("megatron_lm_num_micro_batches", _megatron, default="1"),
    _from("megatron_lm_sequence_parallelism", _megatron, default="no"),
    _from("megatron_lm_recompute_activations", _megatron, default="yes"),
    _from("megatron_lm_use_distributed_optimizer", _megatron, default="no"),
    _from("megatron_lm_gradient_clipping", _megatron),
    _from("num_processes", _several, text="How many processes over all machines?", default="2"),
    _from("gpu_ids", _gpus, text="Which GPUs, as numbers between commas?", default="all"),
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
    _from("fp8_backend", lambda answers: answers.get("mixed_precision") == "fp8", default="ao"),
    _from("fp8_format", lambda answers: answers.get("mixed_precision") == "fp8"),
    _from(
        "downcast_bf16",
        lambda answers: answers["kind"] == "TPU" and answers.get("mixed_precision") == "bf16",
        default="no",
    ),
)
"""Questions about one's own machines."""

TYPE_OF_KIND = {_MACHINES[0]: "NO", "several CPU processes": "MULTI_CPU", "TPU": "XLA", **_GPU_TYPES}
TYPE_OF_ENGINE = {"DeepSpeed": "DEEPSPEED", "FSDP": "FSDP", "Megatron-LM": "MEGATRON_LM"}
