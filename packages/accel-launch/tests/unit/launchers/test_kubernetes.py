"""The manifest for Kubernetes in the guide on clusters fits the schemas, and starts again what was interrupted."""

from pathlib import Path
from typing import Any

import pytest
import yaml

GUIDE = Path(__file__).parents[5] / "docs" / "guides" / "clusters.md"

pytestmark = pytest.mark.skipif(not GUIDE.exists(), reason="only in the repository")


@pytest.fixture
def manifest() -> dict[str, Any]:
    """Return the manifest of the guide."""
    found: dict[str, Any] = yaml.safe_load(GUIDE.read_text().partition("```yaml\n")[2].partition("```")[0])
    return found


FIELDS = {
    # https://github.com/kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go
    "JobSet": {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": dict, "spec": dict},
    "JobSet.spec": {"network": dict, "failurePolicy": dict, "replicatedJobs": list},
    "JobSet.spec.network": {"enableDNSHostnames": bool, "subdomain": str},
    "JobSet.spec.failurePolicy": {"maxRestarts": int, "rules": list},
    "JobSet.spec.failurePolicy.rules": {"name": str, "action": str, "onJobFailureReasons": list},
    "JobSet.spec.replicatedJobs": {"name": str, "replicas": int, "template": dict},
}
"""The fields of a JobSet around its Job, with their types."""


def check_fields(part: dict[str, Any], path: str) -> None:
    """Compare a part of a manifest, and the parts in it, with the table."""
    assert part.keys() == FIELDS[path].keys()
    for name, value in part.items():
        expected = FIELDS[path][name]
        assert type(value) is expected or value == expected, f"{path}.{name}: {value}"
        if f"{path}.{name}" in FIELDS:
            for inner in value if isinstance(value, list) else [value]:
                check_fields(inner, f"{path}.{name}")


@pytest.mark.parametrize("version", ["1.29", "1.31", "1.34"])
def test_manifest_fits_the_schemas(manifest: dict[str, Any], version: str) -> None:
    """Job and pods fit Kubernetes' own schemas, strictly; what is around them fits the fields of a JobSet."""
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    check_fields(manifest, "JobSet")
    (jobs,) = manifest["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "run"}, **jobs["template"]}
    schemas.validate(job, version, strict=True)
    job["spec"]["completion"] = 1
    with pytest.raises(schemas.ValidationError, match="completion"):
        schemas.validate(job, version, strict=True)


def test_only_interrupted_runs_start_again(manifest: dict[str, Any]) -> None:
    """Exit status 75 and a node that is taken away restart the JobSet without counting; other failures end it."""
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["backoffLimit"] == manifest["spec"]["failurePolicy"]["maxRestarts"] == 0
    codes, conditions = job["podFailurePolicy"]["rules"]
    assert codes["onExitCodes"] == {"operator": "In", "values": [75]}
    assert conditions["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    (rule,) = manifest["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])
