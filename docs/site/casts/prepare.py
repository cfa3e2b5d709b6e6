"""Write what the casts find in their folder: a checkpoint, and a script."""

from pathlib import Path

from net import Net
from safetensors.torch import save_file

Path("model").mkdir()
save_file(Net().state_dict(), "model/model.safetensors")
Path("train.py").write_text("from accel import Accelerator\n\nAccelerator()\n")
