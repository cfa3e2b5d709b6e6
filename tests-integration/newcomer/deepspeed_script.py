"""A script that knows nothing of DeepSpeed: what it was launched with decides."""

import json

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator

torch.manual_seed(3)
data = TensorDataset(torch.randn(24, 6), torch.randn(24, 1))
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

accelerator = Accelerator()
world = accelerator.num_processes
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4 // world))
dtype = next(model.parameters()).dtype

norms = []
for _ in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(x.to(dtype)) - y.to(dtype)).float().square().mean())
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()

state = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    stage = model.zero_optimization_stage() if hasattr(model, "zero_optimization_stage") else None
    inner = getattr(optimizer.optimizer, "optimizer", optimizer.optimizer)
    found = {"stage": stage, "world": world, "dtype": str(dtype), "optimizer": type(inner).__name__, "norms": norms}
    print(json.dumps({**found, "weights": [v for _, w in sorted(state.items()) for v in w.float().flatten().tolist()]}))
accelerator.end_training()
