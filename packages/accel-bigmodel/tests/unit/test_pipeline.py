"""What a pipeline refuses before it traces a model."""

import pytest
from torch import nn

from accel_bigmodel.pipeline import build_pipeline
from accel_core.errors import TorchVersionError
from accel_core.host import versions
from accel_core.host.versions import TorchFeature


def test_a_torch_that_cannot_trace_a_sequential_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what the model has and the torch that can trace it, wherever in the model it lies."""
    late = TorchFeature("A pipeline of a model with an nn.Sequential", "99.1", "give the model attributes")
    monkeypatch.setitem(versions.TORCH_FEATURES, "pipeline_of_sequential", late)
    with pytest.raises(
        TorchVersionError, match=r"nn\.Sequential needs a later torch; got torch .* Install torch 99\.1"
    ):
        build_pipeline(nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(2, 2))}), [], [], {}, 1)
