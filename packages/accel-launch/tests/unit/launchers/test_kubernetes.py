"""The manifest for Kubernetes against the schemas, and what is refused before it is submitted."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_core.errors import ConfigurationError, LaunchError, MissingDependencyError
from accel_launch.commands.launch import launch_command_parser
from accel_launch.commands.start import launch, settings_from
from accel_launch.launchers import registry
from accel_launch.launchers.kubernetes import KubernetesLauncher
from accel_launch.settings.resolve import Settings

KUBERNETES = ["--launcher", "kubernetes", "--image", "registry/train:1", "--processes-per-machine", "4"]
EVERYTHING = [
    *("kind=JobSet", "name=run-7", "namespace=research", "gpus=8", "gpu-resource=amd.com/gpu", "cpu=7.5"),
    *("memory=64Gi", "shm=8Gi", "claim=runs:/runs", "workdir=/app", "grace=300", "restarts=2"),
    *("service-account=trainer", "queue=team", "node=pool=a100", "node=example.com/zone=", "pull-secret=registry"),
    *("env=HF_HOME=/runs/$(A)", "secret=HF_TOKEN=hub/token"),
]


@pytest.fixture(autouse=True)
def _threads_are_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the setting that whoever runs the tests may have made."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def settings(*words: str) -> Settings:
    """Resolve a command line."""
    return settings_from(launch_command_parser().parse_args(list(words)))


def manifest(*words: str) -> Any:
    """Return the manifest of a command line."""
    run = settings(*KUBERNETES, *words)
    launcher = registry.choose(run)
    assert isinstance(launcher, KubernetesLauncher)
    text = launcher.job(run)
    assert "&id" not in text, "no references: people read it"
    return yaml.safe_load(text)


def options(*pairs: str) -> list[str]:
    """Return flags that pass options of the pods."""
    return [word for pair in pairs for word in ("--kubernetes", pair)]


FIELDS = {
    # https://github.com/kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go
    "JobSet": {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": dict, "spec": dict},
    "JobSet.spec": {"network?": dict, "failurePolicy?": dict, "successPolicy?": dict, "replicatedJobs": list},
    "JobSet.spec.network": {"enableDNSHostnames?": bool, "subdomain?": str, "publishNotReadyAddresses?": bool},
    "JobSet.spec.failurePolicy": {"maxRestarts?": int, "rules?": list},
    "JobSet.spec.failurePolicy.rules": {"name": str, "action": str, "onJobFailureReasons?": list},
    "JobSet.spec.replicatedJobs": {"name": str, "replicas?": int, "template": dict},
    # https://github.com/kubeflow/training-operator, pkg/apis/kubeflow.org/v1/pytorch_types.go and common_types.go
    "PyTorchJob": {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": dict, "spec": dict},
    "PyTorchJob.spec": {"nprocPerNode?": str, "runPolicy?": dict, "pytorchReplicaSpecs": dict},
    "PyTorchJob.spec.runPolicy": {"backoffLimit?": int, "cleanPodPolicy?": str},
    "PyTorchJob.spec.pytorchReplicaSpecs": {"Master": dict, "Worker?": dict},
    "PyTorchJob.spec.pytorchReplicaSpecs.Master": {"replicas?": int, "restartPolicy?": str, "template": dict},
    "PyTorchJob.spec.pytorchReplicaSpecs.Worker": {"replicas?": int, "restartPolicy?": str, "template": dict},
}
"""Of both kinds, the fields that accel may write around templates, with their types; those with `?` may be absent."""


def check_fields(part: dict[str, Any], path: str) -> None:
    """Compare a part of a manifest, and the parts in it, with the table."""
    wanted = FIELDS[path]
    assert {name for name in wanted if not name.endswith("?")} <= part.keys() <= {name.rstrip("?") for name in wanted}
    for name, value in part.items():
        expected = wanted.get(name, wanted.get(f"{name}?"))
        assert type(value) is expected or value == expected, f"{path}.{name}: {value}"
        if f"{path}.{name}" in FIELDS:
            for inner in value if isinstance(value, list) else [value]:
                check_fields(inner, f"{path}.{name}")


@pytest.mark.parametrize("version", ["1.29", "1.31", "1.34"])
@pytest.mark.parametrize("machines", ["1", "3"])
@pytest.mark.parametrize("kind", ["JobSet", "PyTorchJob"])
@pytest.mark.parametrize("more", [[], EVERYTHING], ids=["plain", "all"])
def test_manifest_fits_the_schemas(kind: str, machines: str, version: str, more: list[str]) -> None:
    """Job and pods fit Kubernetes' own schemas, strictly; what is around them fits the fields of the two kinds."""
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    made = manifest("--machines", machines, *options(*more, f"kind={kind}"), "train.py")
    check_fields(made, kind)
    if kind == "JobSet":
        (jobs,) = made["spec"]["replicatedJobs"]
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "run"}, **jobs["template"]}
        schemas.validate(job, version, strict=True)
        job["spec"]["completion"] = 1
        with pytest.raises(schemas.ValidationError, match="completion"):
            schemas.validate(job, version, strict=True)
        return
    for replica in made["spec"]["pytorchReplicaSpecs"].values():
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "run"}, "template": replica["template"]}
        schemas.validate(pod, version, strict=True)


@pytest.mark.parametrize("kind", ["JobSet", "PyTorchJob"])
def test_pods_are_the_machines(kind: str) -> None:
    """Each machine is a pod with its GPUs, shared memory, port, checkpoints and time to save."""
    more = options(f"kind={kind}", "claim=runs:/runs", "shm=8Gi", "secret=HF_TOKEN=hub/token", "env=A=b")
    spec = manifest("--machines", "3", *more, "train.py")["spec"]
    if kind == "JobSet":
        job = spec["replicatedJobs"][0]["template"]["spec"]
        assert (job["completions"], job["parallelism"], job["completionMode"]) == (3, 3, "Indexed")
        pod = job["template"]["spec"]
    else:
        replicas = spec["pytorchReplicaSpecs"]
        assert {name: replica["replicas"] for name, replica in replicas.items()} == {"Master": 1, "Worker": 2}
        pod = replicas["Worker"]["template"]["spec"]
        assert replicas["Master"]["template"]["spec"] == pod
    (container,) = pod["containers"]
    assert container["command"] == ["accel", "launch", "--nproc-per-node=4", "train.py"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "4"}}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/dev/shm", "/runs"}
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in pod["volumes"]
    assert {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "runs"}} in pod["volumes"]
    assert {"name": "A", "value": "b"} in container["env"]
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    assert token in container["env"]
    assert pod["terminationGracePeriodSeconds"] == 120


def test_only_interrupted_runs_are_started_again() -> None:
    """Exit status 75 and a node that is taken away restart the JobSet without counting; other failures end it."""
    spec = manifest("--machines", "2", "train.py")["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert job["backoffLimit"] == spec["failurePolicy"]["maxRestarts"] == 0
    codes, conditions = job["podFailurePolicy"]["rules"]
    assert codes["onExitCodes"] == {"operator": "In", "values": [75]}
    assert conditions["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])


def test_settings_of_this_machine_reach_the_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags, variables and the file, none of which a pod has, become flags there; a `$` is not filled in."""
    (tmp_path / "config.yaml").write_text("mixed_precision: bf16\ndebug: true\nnum_machines: 2\n")
    monkeypatch.setenv("ACCEL_WATCHDOG", "60")
    words = ["--config-file", str(tmp_path / "config.yaml"), "--cpu", "--tee", "3", "--fp8-override-linear-precision"]
    first = settings(*KUBERNETES, *words, "1,0,1", "train.py", "--name", "$(A) $")
    (pod,) = yaml.safe_load(KubernetesLauncher().job(first))["spec"]["replicatedJobs"]
    command = pod["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[-2:] == ["--name", "$$(A) $$"]
    monkeypatch.delenv("ACCEL_WATCHDOG")
    second = settings(*command[2:])
    different = {key for key in first if first[key] != second[key]}
    assert different == {"launcher", "image", "config_file", "num_machines"}  # WORLD_SIZE of the pod says the last


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (options("size=3"), "has no option 'size'. Give it one of kind, name, "),
        (options("gpus"), "gpus is not valid; got ''. Give it the number of GPUs of each machine"),
        (options("workdir=/a\nb"), "workdir is not valid"),
        (options("kind=Job"), "kind is not valid; got 'Job'. Give it JobSet or PyTorchJob"),
        (options("name=A_b"), "name is not valid; got 'A_b'"),
        (options("gpus=all"), "gpus is not valid; got 'all'"),
        (options("grace=30"), "grace is not valid; got '30'. Give it seconds to save in, more than 30"),
        (options("claim=runs:checkpoints"), "claim is not valid"),
        (
            options("secret=HF_TOKEN=hf_abc"),
            "secret is not valid; got 'HF_TOKEN'. Give it a variable, as in secret=HF_TOKEN=",
        ),
        (options("node=pool=a\nb"), "node is not valid"),
        (["--nnodes", "1:2"], "a fixed number of machines; got 1:2 from --nnodes"),
        (["--image", ""], "Pods need an image in which accel is installed; got none"),
    ],
)
def test_wrong_descriptions_are_refused(words: list[str], message: str) -> None:
    """An option that is unknown or not valid, a run of changing size, and one without an image are refused by name."""
    with pytest.raises(ConfigurationError, match=message):
        manifest(*words, "train.py")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([*options("env=HF_TOKEN=hf_abc"), "train.py"], "HF_TOKEN"),
        ([*options("env=AWS_SECRET_ACCESS_KEY=abc"), "train.py"], "AWS_SECRET_ACCESS_KEY"),
        ([*options("env=MLFLOW_TRACKING_PASSWORD=abc"), "train.py"], "MLFLOW_TRACKING_PASSWORD"),
        (["train.py", "--lr", "1", "--hub-token", "hf_abc"], "--hub-token"),
        (["train.py", "--wandb_api_key=abc"], "--wandb_api_key"),
    ],
)
def test_secrets_are_never_in_the_manifest(words: list[str], name: str) -> None:
    """A variable or an argument of the script that looks like a secret is refused, and its value is not shown."""
    with pytest.raises(ConfigurationError, match=f"holds no secrets; got {name}, which .*secret=VARIABLE") as refused:
        manifest(*words)
    assert "abc" not in str(refused.value)


def test_what_only_sounds_like_a_secret_is_passed_on() -> None:
    """Tokens of a text, and switches about tokens, are no secrets; no variable of this machine is in the manifest."""
    words = ["--pad_token", "<pad>", "--max-tokens", "9", "--use_auth_token", "--tokenizer", "t", "--monkey", "m"]
    made = str(manifest(*options("env=TOKENIZERS_PARALLELISM=false"), "train.py", *words))
    assert all(word in made for word in words)


def test_options_without_the_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """--image alone would have no effect; the variable may stay set for runs on this machine."""
    with pytest.raises(ConfigurationError, match=r"--image describes pods; got no --launcher kubernetes"):
        registry.choose(settings("--image", "x", "train.py"))
    monkeypatch.setenv("ACCEL_IMAGE", "x")
    assert registry.choose(settings("--cpu", "train.py")).name == "simple"


def test_script_is_looked_for_in_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A script that this machine does not have can be submitted, under a name that Kubernetes takes."""
    monkeypatch.chdir(tmp_path)
    args = launch_command_parser().parse_args([*KUBERNETES, "--dry-run", "/app/7_Train LoRA.v2.py"])
    assert launch(args) == 0
    assert "\n  name: train-lora-v2\n" in capsys.readouterr().out


def test_machine_without_kubectl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that cannot submit says so, and names --dry-run."""
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(MissingDependencyError, match=r"got none on PATH.*--dry-run"):
        KubernetesLauncher().run(settings(*KUBERNETES, "train.py"))


def test_manifest_is_given_to_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A stand-in for kubectl gets what --dry-run shows; how to see the log and how to end the run is told."""
    (tmp_path / "kubectl").write_text(f'#!/bin/sh\ncat > {tmp_path}/got\necho "jobset $* created"\n')
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    run = settings(*KUBERNETES, *options("namespace=research"), "train.py")
    assert KubernetesLauncher().run(run) == 0
    assert (tmp_path / "got").read_text() == KubernetesLauncher().job(run)
    told = capsys.readouterr().err
    assert "jobset apply -f - created; `kubectl -n research delete jobset train` ends it" in told
    assert "`kubectl -n research logs -f --prefix -l jobset.sigs.k8s.io/jobset-name=train` shows its log" in told


def test_refusal_of_kubectl_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What kubectl says is in the error."""
    (tmp_path / "kubectl").write_text("#!/bin/sh\necho 'no matches for kind \"JobSet\"' >&2\nexit 1\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(
        LaunchError, match=r'did not take the run; kubectl gives: no matches for kind "JobSet".*dry-run'
    ):
        KubernetesLauncher().run(settings(*KUBERNETES, "train.py"))


@pytest.mark.parametrize(("words", "each"), [((), 8), (("-n", "4"), 2), (("--processes-per-machine", "3"), 3)])
def test_gpus_of_pods_have_a_process_each(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], each: int) -> None:
    """Where no number of processes is given, that of the pods' GPUs is meant, whatever GPUs are on this machine."""
    monkeypatch.setattr("accel_launch.settings.devices._present", lambda: 1)
    for kind in ("JobSet", "PyTorchJob"):
        run = settings(*KUBERNETES[:4], "--machines", "2", *words, *options(f"kind={kind}", "gpus=8"), "train.py")
        text = KubernetesLauncher().job(run)
        assert f"--nproc-per-node={each}\n" in text
        assert (f"nprocPerNode: '{each}'" in text) == (kind == "PyTorchJob")
