"""Training on two ranks with real trackers and one that fails."""

import json
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_core.accelerator import Accelerator
from accel_core.plugins.project import ProjectConfiguration
from accel_core.tracking.tracker import GeneralTracker
from accel_testing import requires, world

CONFIG = {"lr": 0.1, "model": {"sizes": [3, None]}, "dtype": torch.float32}


class Raising(GeneralTracker):
    """Raises at every call."""

    name = "raising"
    requires_logging_directory = False
    tracker = None

    def start(self):
        """Start."""

    def store_init_configuration(self, values):
        """Raise."""
        raise ConnectionError("no network")

    def log(self, values, step=None, **kwargs):
        """Raise."""
        raise ConnectionError("no network")

    def finish(self):
        """Raise."""
        raise ConnectionError("no network")


def _train(accelerator, start=0, stop=6):
    """Train a linear layer and log the loss that all ranks have together; return what was logged."""
    torch.manual_seed(0)
    inputs = torch.randn(24, 3)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=2)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    logged = []
    for step, (x, y) in zip(range(start, stop), loader, strict=False):
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.log({"loss": mean, "rank": accelerator.process_index}, step=step)
        logged.append((step, mean.item()))
    return logged


def _event_losses(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


@requires("tensorboard", "mlflow")
@world(2, quiet=12, environment={"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true"})
def test_two_real_trackers_and_one_that_fails(tmp_path):
    """Training ends normally, TensorBoard and MLflow hold every value, and a file those of the third."""
    import mlflow

    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", "mlflow", Raising()], project_dir=tmp_path / "logs")
    accelerator.init_trackers("project", CONFIG, {"mlflow": {"logging_dir": str(tmp_path / "artifacts")}})
    names = [tracker.name for tracker in accelerator.trackers]
    logged = _train(accelerator)
    is_main = accelerator.is_main_process
    accelerator.end_training()
    assert names == ["tensorboard", "mlflow", "raising"]
    if not is_main:
        return
    assert _event_losses(tmp_path / "logs" / "project") == logged
    (run,) = [path.parent for path in (tmp_path / "mlruns").glob("*/*/metrics")]
    rows = [line.split() for line in (run / "metrics" / "loss").read_text().splitlines()]
    assert [(int(step), float(value)) for _, value, step in rows] == logged
    ranks = {line.split()[1] for line in (run / "metrics" / "rank").read_text().splitlines()}
    assert ranks == {"0.0"}
    params = {file.name: file.read_text() for file in (run / "params").iterdir()}
    assert params == {"lr": "0.1", "model.sizes.0": "3", "model.sizes.1": "None", "dtype": "torch.float32"}
    assert mlflow.get_run(run.name).info.status == "FINISHED"
    (path,) = (tmp_path / "logs").glob("undelivered-*.jsonl")
    config, *entries = map(json.loads, path.read_text().splitlines())
    assert config["args"] == [{**CONFIG, "dtype": "torch.float32"}]
    assert [(entry["step"], entry["args"][0]["loss"]) for entry in entries] == logged
    assert mlflow.active_run() is None


@requires("tensorboard")
@world(2)
def test_a_checkpoint_continues_the_run(tmp_path):
    """The run's id and steps are in the checkpoint; a resumed run that counts from zero goes on, not back."""
    project = ProjectConfiguration(project_dir=str(tmp_path), logging_dir=str(tmp_path / "logs"))
    first = Accelerator(cpu=True, log_with="tensorboard", project_config=project)
    first.init_trackers("project")
    before = _train(first, 0, 3)
    run_id = first._runtime.hub.run_id
    first.save_state(str(tmp_path / "state"))
    first._runtime.hub.finish()

    again = Accelerator(cpu=True, log_with="tensorboard", project_config=project)
    again.init_trackers("project")
    again.load_state(str(tmp_path / "state"))
    after = _train(again, 0, 3)
    assert again._runtime.hub.run_id == run_id
    is_main = again.is_main_process
    again.end_training()
    if is_main:
        curve = _event_losses(tmp_path / "logs" / "project")
        assert curve == before + [(step + 3, loss) for step, loss in after]
        assert json.loads(json.dumps(run_id)) is not None
    assert Path(tmp_path, "state").is_dir()
