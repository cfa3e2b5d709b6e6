"""Gradient accumulation, clipping, metrics over several processes, and a checkpoint, from the documentation alone."""

import sys

import torch
from sklearn.datasets import load_wine
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration, set_seed

set_seed(1)
features, labels = load_wine(return_X_y=True)
features = (features - features.mean(0)) / features.std(0)
data = TensorDataset(torch.tensor(features, dtype=torch.float32), torch.tensor(labels))
train, test = torch.utils.data.random_split(data, [141, 37])

accelerator = Accelerator(
    gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3),
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    project_config=ProjectConfiguration(project_dir=sys.argv[1], automatic_checkpoint_naming=True, total_limit=2),
)
model = torch.nn.Sequential(torch.nn.Linear(13, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
train_loader, test_loader = DataLoader(train, batch_size=8, shuffle=True), DataLoader(test, batch_size=5)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, test_loader, scheduler
)

for _ in range(12):
    for inputs, targets in train_loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.save_state()

weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
accelerator.load_state()
restored = accelerator.get_state_dict(model)
same = all(torch.equal(restored[name], value) for name, value in weights.items())

model.eval()
guesses, truths = [], []
for inputs, targets in test_loader:
    with torch.no_grad():
        logits = model(inputs)
    logits, targets = accelerator.gather_for_metrics((logits, targets))
    guesses.append(logits.argmax(dim=1))
    truths.append(targets)
guesses, truths = torch.cat(guesses), torch.cat(truths)
accelerator.print(f"samples {len(truths)} accuracy {float((guesses == truths).float().mean()):.3f} restored {same}")
accelerator.end_training()
