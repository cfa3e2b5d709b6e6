"""A language model on words, by the loop of the guide: what it was launched with decides who shares its sequences."""

import json
import sys

import torch
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForCausalLM

from accelerate import Accelerator

ROWS, TOKENS, WORDS = 8, 8, 32

accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="sdpa")
made_in_parts = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
words = torch.randint(WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(5))
rows = [{"input_ids": each, "labels": each} for each in words]
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
loader = torch.utils.data.DataLoader(rows, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

norms, seen = [], 0
for _ in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            whole = batch.pop("labels", None)
            labels = pad(whole[:, 1:], (0, 1), value=-100) if "shift_labels" not in batch else batch.pop("shift_labels")
            seen = batch["input_ids"].shape[1]
            logits = model(**batch).logits.flatten(0, 1)
            loss = cross_entropy(logits, labels.flatten(), reduction="sum")
            accelerator.backward(loss, weight=(labels != -100).sum())
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()

state = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    stage = model.zero_optimization_stage() if hasattr(model, "zero_optimization_stage") else None
    found = {"world": accelerator.num_processes, "stage": stage, "tokens": seen, "made in parts": made_in_parts}
    weights = [v for _, w in sorted(state.items()) for v in w.float().flatten().tolist()]
    print(json.dumps({**found, "norms": norms, "weights": weights}))
accelerator.end_training()
