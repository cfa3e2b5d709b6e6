"""DVCLive."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_core.tracking.tracker import GeneralTracker, on_main_process
from accel_trackers import values as sorting


class DVCLiveTracker(GeneralTracker):
    """Writes metrics, parameters and plots as files that DVC reads.

    Args:
        run_name: Not used: DVCLive names experiments by itself, or by `exp_name`.
        live: A `dvclive.Live` to use; by default one is made.
        **kwargs: Passed to `dvclive.Live`.

    Attributes:
        live: The `Live` object, once started.
    """

    name = "dvclive"
    requires_logging_directory = False
    fills_step = True
    libraries = ("dvclive",)

    @on_main_process
    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: object) -> None:
        super().__init__()
        self.run_name = run_name
        self.live = live
        self.init_kwargs: dict[str, Any] = kwargs
        self._finished = False
        self._earlier: Path | None = None

    @on_main_process
    def start(self) -> None:
        """Make the `Live` object, unless one was given."""
        if self.live is None:
            from dvclive import Live

            self._keep_earlier()
            self.live = Live(**self.init_kwargs)
        self._finished = False

    def _keep_earlier(self) -> None:
        """Copy the files of an earlier run: `Live` removes them, and a checkpoint may still continue that run."""
        folder = Path(self.init_kwargs.get("dir", "dvclive"))
        if folder.is_dir() and not self.init_kwargs.get("resume"):
            self._earlier = Path(tempfile.mkdtemp(prefix="accel-dvclive-")) / "dvclive"
            shutil.copytree(folder, self._earlier)

    @property
    def tracker(self) -> Any:
        """The `Live` object."""
        return self.live

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration as parameters."""
        assert self.live is not None, "started"
        self.live.log_params(sorting.config_table(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Log numbers and texts at a step, anything else as its text, and make the step's summary."""
        assert self.live is not None, "started"
        if step is not None:
            self.live.step = step
        parts = sorting.sort(values)
        for name, value in {**parts.numbers, **parts.texts}.items():
            self.live.log_metric(name, value, **kwargs)
        self.live.next_step()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **_: object) -> None:
        """Store images, arrays of shape (H, W, C) or PIL images, as PNG files, one for each step."""
        assert self.live is not None, "started"
        for name, images in values.items():
            for index, image in enumerate(images):
                stem = name if len(images) == 1 else f"{name}/{index}"
                self.live.log_image(f"{stem}.png" if step is None else f"{stem}-{step}.png", image)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Copy a file or folder to `artifacts` in the run's folder, and give it to DVC if there is a repository."""
        assert self.live is not None, "started"
        target = Path(self.live.artifacts_dir) / (artifact_path or Path(local_path).name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if Path(local_path).is_dir():
            shutil.copytree(local_path, target, dirs_exist_ok=True)
        else:
            shutil.copy2(local_path, target)
        self.live.log_artifact(str(target))

    @on_main_process
    def finish(self) -> None:
        """End the run; a second call does nothing."""
        if self.live is not None and not self._finished:
            self._finished = True
            self.live.end()
        if self._earlier is not None:
            shutil.rmtree(self._earlier.parent, ignore_errors=True)
            self._earlier = None

    @on_main_process
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue in the same folder, after what is there."""
        self.init_kwargs = {**self.init_kwargs, "resume": True}
        if self.live is None or self._earlier is None:
            return
        folder = Path(self.live.dir)
        self.live.end()
        shutil.rmtree(folder)
        shutil.move(self._earlier, folder)
        self.live = None
        self.start()
