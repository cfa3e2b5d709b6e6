"""Kubernetes: writes the JobSet or PyTorchJob of a run, and hands it to kubectl."""

import itertools
import json
import re
import shutil
import subprocess
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from accel_core.errors import ConfigurationError, LaunchError, MissingDependencyError
from accel_launch.launchers.launcher import Launcher, flags_of
from accel_launch.settings.layout import ProcessLayout
from accel_launch.settings.resolve import Settings
from accel_launch.supervision.signals import TERMINATION_GRACE_S
from accel_launch.terminal import say

__all__ = ["KubernetesLauncher"]

_NOT_PASSED_ON = {
    *("num_machines", "num_processes", "nproc_per_node", "nnodes", "machine_rank", "main_process_ip"),
    *("main_process_port", "launcher", "image", "kubernetes", "slurm", "config_file"),
    *("dry_run", "json", "explain", "all", "aws_access_key_id", "aws_secret_access_key"),
}
"""Settings that are in the manifest in another way, or concern this machine alone."""

_NAME = r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?"
_DOTTED = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
_AMOUNT = r"[0-9]+(\.[0-9]+)?([KMGTP]i?|k|m)?"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_PATH = r"/[^:\n]*"

_OPTIONS = {
    "kind": ("JobSet|PyTorchJob", "JobSet or PyTorchJob"),
    "name": (_NAME, "at most 40 lower-case letters, digits and dashes, a letter first"),
    "namespace": (_DOTTED, "the name of a namespace"),
    "gpus": ("[0-9]+", "the number of GPUs of each machine"),
    "gpu-resource": (rf"{_DOTTED}/{_LABEL}", "a resource, as in amd.com/gpu"),
    "cpu": (_AMOUNT, "the cores of each machine, as in 8"),
    "memory": (_AMOUNT, "the memory of each machine, as in 64Gi"),
    "shm": (_AMOUNT, "the most that /dev/shm may hold, as in 8Gi"),
    "claim": (rf"{_DOTTED}(:{_PATH})?", "a PersistentVolumeClaim and a folder, as in runs:/checkpoints"),
    "workdir": (_PATH, "a folder of the image, as in /app"),
    "grace": ("[0-9]{2,5}", f"seconds to save in, more than {TERMINATION_GRACE_S:.0f}"),
    "restarts": ("[0-9]+", "how many times the machines are started again after a failure"),
    "service-account": (_DOTTED, "the name of a service account"),
    "queue": (_LABEL, "a queue of Kueue"),
    "node": (rf"({_DOTTED}/)?{_LABEL}=({_LABEL})?", "a label of nodes, as in node=pool=a100"),
    "pull-secret": (_DOTTED, "the name of a Secret with which the image is pulled"),
    "env": (rf"{_VARIABLE}=.*", "a variable, as in env=HF_HOME=/cache"),
    "secret": (rf"{_VARIABLE}={_DOTTED}/[\w.-]+", "a variable, as in secret=HF_TOKEN=SECRET/KEY"),
}
"""What --kubernetes takes: what a value looks like, and what it is."""
_REPEATED = ("node", "pull-secret", "env", "secret")

_SECRET = (
    r"(?:^|_)(?:pass(?:word|wd|phrase)|secret|credentials?|(?:api|access|private|secret)_?key"
    r"|(?:access|api|auth|github|hf|hub|wandb)_token)(?:_|$)"
)
"""Names under which a secret is passed; `pad_token` and `max_tokens` are none."""

_INTERRUPTED = [
    {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [75]}},
    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
]
"""Pods whose ranks all saved and left with 75, and pods whose node was taken away, end the Job."""
_ACTION = "RestartJobSetAndIgnoreMaxRestarts"
_RESUME = {"name": "resume", "action": _ACTION, "onJobFailureReasons": ["PodFailurePolicy"]}
"""The JobSet then starts it again as a whole."""

_LABELS = {"JobSet": "jobset.sigs.k8s.io/jobset-name", "PyTorchJob": "training.kubeflow.org/job-name"}


class KubernetesLauncher(Launcher):
    """A JobSet or a PyTorchJob, in which each pod is a machine with one launcher."""

    name = "kubernetes"

    def claims(self, settings: Settings) -> bool:
        """Take a run for which Kubernetes was asked by name."""
        chosen = bool(settings["launcher"] == self.name)
        unused = [f"--{key}" for key in ("image", "kubernetes") if settings.resolved[key].origin == "flag"]
        if unused and not chosen:
            raise ConfigurationError(f"{unused[0]} describes pods; got no --launcher kubernetes. Pass it as well.")
        return chosen

    def command(self, settings: Settings) -> list[str]:
        """Return the command of every pod; the machines learn their numbers from variables."""
        each = f"--nproc-per-node={_layout(settings, _options(settings)).per_machine}"
        flags = flags_of(settings, _NOT_PASSED_ON, ("flag", "environment", "file"))
        return ["accel", "launch", each, *flags, str(settings.script), *settings.arguments]

    def job(self, settings: Settings) -> str:
        """Return the manifest as YAML.

        Raises:
            ConfigurationError: There is no image, an option is not valid, a secret would be in the manifest, or the
                number of machines may change.
        """
        options = _options(settings)
        layout, name = _layout(settings, options), _name(settings, options)
        if layout.fewest_machines != layout.machines:
            raise ConfigurationError(
                f"Kubernetes starts a fixed number of machines; got {layout.nnodes} from {settings.source('nnodes')}. "
                "Pass --machines."
            )
        labels = {"kueue.x-k8s.io/queue-name": options["queue"]} if "queue" in options else {}
        metadata = _given(name=name, namespace=options.get("namespace"), labels=labels)
        make = _job_set if options["kind"] == "JobSet" else _pytorch_job
        pod = _pod(settings, options, self.command(settings))
        version, spec = make(name, layout, int(options["restarts"]), pod)
        manifest = {"apiVersion": version, "kind": options["kind"], "metadata": metadata, "spec": spec}
        # Through JSON, so that no part is shared: YAML would have it once, and references to it.
        return str(import_module("yaml").safe_dump(json.loads(json.dumps(manifest)), sort_keys=False, width=120))

    def run(self, settings: Settings) -> int:
        """Hand the manifest to kubectl."""
        manifest, options = self.job(settings), _options(settings)
        if shutil.which("kubectl", path=settings.inherited.get("PATH")) is None:
            raise MissingDependencyError(
                "Runs are submitted to Kubernetes with kubectl; got none on PATH. Install it, or apply elsewhere what "
                "`--dry-run` shows."
            )
        words = ["kubectl", "apply", "-f", "-"]
        done = subprocess.run(words, input=manifest, capture_output=True, text=True, check=False)
        if done.returncode:
            told = f"Kubernetes did not take the run; kubectl gives: {done.stderr.strip()}."
            raise LaunchError(f"{told} `--dry-run` shows what it got.")
        name, where = _name(settings, options), f" -n {options['namespace']}" if "namespace" in options else ""
        say(f"accel launch: {done.stdout.strip()}; `kubectl{where} delete {options['kind'].lower()} {name}` ends it")
        say(f"accel launch: `kubectl{where} logs -f --prefix -l {_LABELS[options['kind']]}={name}` shows its log")
        return 0


def _options(settings: Settings) -> dict[str, Any]:
    """Return what --kubernetes says, with defaults; options that may be repeated as lists."""
    found: dict[str, Any] = {key: [] for key in _REPEATED}
    found |= {"kind": "JobSet", "gpu-resource": "nvidia.com/gpu", "grace": "120", "restarts": "0"}
    found["gpus"] = "0" if settings["cpu"] else str(settings.layout.per_machine)
    for pair in settings["kubernetes"] or []:
        key, _, value = pair.partition("=")
        if key not in _OPTIONS:
            raise ConfigurationError(f"--kubernetes has no option {key!r}. Give it one of {', '.join(_OPTIONS)}.")
        pattern, wanted = _OPTIONS[key]
        if not re.fullmatch(pattern, value, re.ASCII) or (key == "grace" and int(value) <= TERMINATION_GRACE_S):
            shown = value.partition("=")[0] if key == "secret" else value  # it may have been given by its value
            raise ConfigurationError(f"--kubernetes {key} is not valid; got {shown!r}. Give it {wanted}.")
        found[key] = [*found[key], value] if key in _REPEATED else value
    names = [pair.partition("=")[0] for pair in found["env"]]
    secrets = [name for name in names if re.search(f"{_SECRET}|token$", name.lower())]
    for word, following in itertools.pairwise((*settings.arguments, "--")):
        flag, equals, _ = word.partition("=")
        has_value = flag.startswith("--") and (equals or not following.startswith("--"))
        if has_value and re.search(_SECRET, flag.strip("-").replace("-", "_").lower()):
            secrets.append(flag)
    if secrets:
        raise ConfigurationError(
            f"A manifest holds no secrets; got {secrets[0]}, which looks like one. Put it into a Secret of the "
            "cluster, pass --kubernetes secret=VARIABLE=SECRET/KEY, and read that variable in the script."
        )
    return found


def _layout(settings: Settings, options: dict[str, Any]) -> ProcessLayout:
    """Return where processes are: one for each GPU of a pod, unless their number was given."""
    layout, gpus = settings.layout, int(options["gpus"])
    if not gpus or settings["num_processes"] or settings["nproc_per_node"]:
        return layout
    return replace(layout, processes=gpus * layout.machines, per_machine=gpus)


def _given(**parts: Any) -> dict[str, Any]:
    """Return the parts of a manifest that are not empty."""
    return {name: part for name, part in parts.items() if part}


def _name(settings: Settings, options: dict[str, Any]) -> str:
    """Return the name of the run: the one that was given, or one made of the script's."""
    stem = str(settings.script).rpartition(".")[2] if settings["module"] else Path(str(settings.script)).stem
    made = re.sub(r"[^a-z0-9]+", "-", stem.lower()).lstrip("-0123456789")[:40].strip("-")
    return str(options.get("name", made or "train"))


def _pod(settings: Settings, options: dict[str, Any], command: list[str]) -> dict[str, Any]:
    """Return what both kinds have in common: the pod of a machine."""
    if not settings["image"]:
        raise ConfigurationError("Pods need an image in which accel is installed; got none. Pass --image.")
    gpus = {options["gpu-resource"]: options["gpus"]} if int(options["gpus"]) else {}
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": _given(medium="Memory", sizeLimit=options.get("shm"))}]
    if "claim" in options:
        claim, _, folder = options["claim"].partition(":")
        mounts.append({"name": "checkpoints", "mountPath": folder or "/checkpoints"})
        volumes.append({"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}})
    pairs = [pair.partition("=") for pair in options["env"]]
    references = [re.split("[=/]", pair) for pair in options["secret"]]
    variables = [{"name": name, "value": value.replace("$", "$$")} for name, _, value in pairs] + [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}} for name, secret, key in references
    ]
    # The launcher is process 1. It gets SIGTERM, after which the ranks have 30 s, once this ends.
    notice = f"kill -USR1 1; sleep {int(options['grace']) - int(TERMINATION_GRACE_S)}"
    container = _given(
        name="pytorch",
        image=settings["image"],
        command=[word.replace("$", "$$") for word in command],  # Kubernetes fills in $(NAME)
        workingDir=options.get("workdir"),
        env=variables,
        ports=[{"name": "pytorchjob-port", "containerPort": int(settings["main_process_port"] or 29500)}],
        resources={"limits": _given(cpu=options.get("cpu"), memory=options.get("memory")) | gpus},
        volumeMounts=mounts,
        lifecycle={"preStop": {"exec": {"command": ["sh", "-c", notice]}}},
    )
    return _given(
        terminationGracePeriodSeconds=int(options["grace"]),
        serviceAccountName=options.get("service-account"),
        imagePullSecrets=[{"name": name} for name in options["pull-secret"]],
        nodeSelector=dict(pair.split("=", 1) for pair in options["node"]),
        containers=[container],
        volumes=volumes,
    )


def _job_set(name: str, layout: ProcessLayout, restarts: int, pod: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a JobSet of one Job, in which the number of a pod is the number of a machine."""
    container = pod["containers"][0]
    if layout.machines > 1:
        port = container["ports"][0]["containerPort"]
        fixed = {"MASTER_ADDR": f"{name}-machine-0-0.{name}", "MASTER_PORT": port, "WORLD_SIZE": layout.machines}
        places = [{"name": key, "value": str(value)} for key, value in fixed.items()]
        index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
        container["env"] = [*container.get("env", []), *places, {"name": "RANK", "valueFrom": index}]
    job = {
        "completionMode": "Indexed",
        "completions": layout.machines,
        "parallelism": layout.machines,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": _INTERRUPTED},
        "template": {"spec": {"restartPolicy": "Never", **pod}},
    }
    return "jobset.x-k8s.io/v1alpha2", {
        "network": {"enableDNSHostnames": True, "subdomain": name},
        "failurePolicy": {"maxRestarts": restarts, "rules": [_RESUME]},
        "replicatedJobs": [{"name": "machine", "replicas": 1, "template": {"spec": job}}],
    }


def _pytorch_job(name: str, layout: ProcessLayout, restarts: int, pod: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a PyTorchJob, whose operator gives the pods their numbers and the address of the first."""
    replica = {"restartPolicy": "OnFailure" if restarts else "Never", "template": {"spec": pod}}
    replicas = {"Master": {"replicas": 1, **replica}}
    if layout.machines > 1:
        replicas["Worker"] = {"replicas": layout.machines - 1, **replica}
    return "kubeflow.org/v1", {
        "nprocPerNode": str(layout.per_machine),
        "runPolicy": {"backoffLimit": restarts},
        "pytorchReplicaSpecs": replicas,
    }
