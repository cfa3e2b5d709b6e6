"""bf16 and a compiled model, from the documentation alone."""

import sys

import torch
from sklearn.datasets import load_breast_cancer
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin, set_seed

set_seed(2)
features, labels = load_breast_cancer(return_X_y=True)
features = (features - features.mean(0)) / features.std(0)
data = TensorDataset(torch.tensor(features, dtype=torch.float32), torch.tensor(labels))
loader = DataLoader(data, batch_size=57, shuffle=True, drop_last=True)
model = torch.nn.Sequential(torch.nn.Linear(30, 32), torch.nn.GELU(), torch.nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

accelerator = Accelerator(mixed_precision="bf16", dynamo_plugin=TorchDynamoPlugin(backend=sys.argv[1]))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

dtypes = set()
for _ in range(8):
    for inputs, targets in loader:
        outputs = model(inputs)
        dtypes.add(outputs.dtype)
        loss = torch.nn.functional.cross_entropy(outputs, targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

with torch.no_grad(), accelerator.autocast():
    inner = accelerator.unwrap_model(model, keep_torch_compile=False)
    plain = torch.tensor(features, dtype=torch.float32)
    right = (accelerator.unwrap_model(inner, keep_fp32_wrapper=False)(plain).argmax(1) == torch.tensor(labels)).float()
accelerator.print(f"outputs {sorted(map(str, dtypes))} accuracy {float(right.mean()):.3f} type {type(inner).__name__}")
