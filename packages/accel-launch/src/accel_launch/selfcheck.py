"""What every rank of `accel test` does.

It runs in the started processes, so it may import torch. Every step prints one line on the main process, or fails
and says what was found.
"""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_core.accelerator import Accelerator
from accel_core.errors import LaunchError
from accel_launch.settings.layout import counted

_SAMPLES, _BATCH, _STEPS = 37, 4, 3
_SIZE, _RATE = 1 / 16, 25.6
"""Largest input, and the learning rate that is right for it; scaled gradients of larger ones would overflow fp16."""
_TOLERANCE = {"no": 1e-5, "fp16": 2e-3, "bf16": 1e-2, "fp8": 1e-2}
"""How far weights may differ that move by 0.4 and more: a few steps of the number format."""


def main() -> None:
    """Run the steps on this rank."""
    accelerator = Accelerator()
    steps = (("processes start and gather", _gathers), ("data is split", _splits), ("training is alike", _trains))
    for name, step in steps:
        step(accelerator)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            sys.stdout.write(
                f"{name}: holds for {counted(accelerator.num_processes, 'process', 'es')} on {accelerator.device}\n"
            )
    accelerator.end_training()


def _gathers(accelerator: Accelerator) -> None:
    mine = torch.tensor([accelerator.process_index], device=accelerator.device)
    found = accelerator.gather(mine).tolist()
    _hold(found == list(range(accelerator.num_processes)), f"gathered ranks {found}")


def _splits(accelerator: Accelerator) -> None:
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(_SAMPLES)), batch_size=_BATCH))
    seen = [int(value) for (batch,) in loader for value in accelerator.gather_for_metrics(batch).tolist()]
    _hold(
        sorted(seen) == list(range(_SAMPLES)), f"saw {len(seen)} samples, {len(set(seen))} of {_SAMPLES} different ones"
    )


def _trains(accelerator: Accelerator) -> None:
    whole = _BATCH * accelerator.num_processes
    inputs = _SIZE * torch.linspace(-1, 1, whole * _STEPS * 3).reshape(-1, 3)
    targets = inputs.sum(dim=1, keepdim=True)
    alone = _model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=_RATE)
    for batch, target in DataLoader(TensorDataset(inputs, targets), batch_size=whole):
        optimizer.zero_grad()
        torch.autograd.backward(torch.nn.functional.mse_loss(alone(batch), target))
        optimizer.step()
    model = _model()
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=_BATCH)
    together, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=_RATE), loader)
    dtype = next(together.parameters()).dtype  # an engine may have cast the model, and leaves inputs to the script
    for batch, target in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(together(batch.to(dtype)).float(), target))
        optimizer.step()
    together.eval()
    with torch.no_grad():  # what it computes of these are its weights, also where ranks hold a part each
        weight = together(torch.eye(3, dtype=dtype, device=accelerator.device)).float().cpu()
    difference = float((weight - alone.weight.detach().T).abs().max())
    near = _TOLERANCE[accelerator.mixed_precision]
    _hold(difference < near, f"weights differ by {difference:.2e} from one process's")


def _model() -> torch.nn.Linear:
    model = torch.nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.1, -0.2, 0.3]]))
    return model


def _hold(condition: bool, found: str) -> None:
    if not condition:
        raise LaunchError(f"The check failed: {found}. Compare `accel env` on all machines and the configuration.")


if __name__ == "__main__":
    main()
