"""Train on four fifths of the wines, five times, and test every wine once by a model that has not seen it.

    accel launch --cpu --num-processes 2 examples/gallery/cross_validation.py

Shows several trainings in one process (`free_memory` between them) and metrics of scikit-learn over all processes.
"""

import torch
from sklearn.datasets import load_wine
from sklearn.metrics import accuracy_score, f1_score
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, set_seed
from report import finish, folder

EPOCHS = 20


def main() -> None:
    """Train and test each fold, then measure all predictions together."""
    target = folder(__doc__, "cross_validation")
    accelerator = Accelerator()
    wines = load_wine()
    values = torch.tensor(wines.data, dtype=torch.float32)
    labels = torch.tensor(wines.target)

    truth, predicted, scores = [], [], []
    folds = StratifiedKFold(n_splits=5, shuffle=True, random_state=0)
    for train, test in folds.split(wines.data, wines.target):
        set_seed(0)
        mean, spread = values[train].mean(0), values[train].std(0)
        data = TensorDataset((values - mean) / spread, labels)
        loader = DataLoader(torch.utils.data.Subset(data, train), batch_size=16, shuffle=True)
        test_loader = DataLoader(torch.utils.data.Subset(data, test), batch_size=16)
        model = nn.Sequential(nn.Linear(values.shape[1], 16), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
        for _ in range(EPOCHS):
            for inputs, wanted in loader:
                accelerator.backward(nn.functional.cross_entropy(model(inputs), wanted))
                optimizer.step()
                optimizer.zero_grad()
        fold_truth, fold_predicted = [], []
        for inputs, wanted in test_loader:
            with torch.no_grad():
                guesses = model(inputs).argmax(1)
            guesses, wanted = accelerator.gather_for_metrics((guesses, wanted))
            fold_predicted += guesses.tolist()
            fold_truth += wanted.tolist()
        scores.append(accuracy_score(fold_truth, fold_predicted))
        truth, predicted = truth + fold_truth, predicted + fold_predicted
        accelerator.free_memory()

    assert len(truth) == len(labels), "every wine is tested once"
    rows = {
        "processes": accelerator.num_processes,
        "wines tested": len(truth),
        "accuracy": f"{accuracy_score(truth, predicted):.3f}",
        "F1, mean of the classes": f"{f1_score(truth, predicted, average='macro'):.3f}",
        "folds": ", ".join(f"{score:.2f}" for score in scores),
    }
    finish(accelerator, target, "Cross-validation", rows, {"fold": scores})


if __name__ == "__main__":
    main()
