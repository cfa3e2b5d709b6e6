"""The transformers Trainer with streams to evaluate, compiled models, Accelerators of other classes, and pickles."""

import pickle
from collections.abc import Callable
from typing import Any

import transformers.trainer
from datasets import Dataset
from models import WORLD, Stream, llama, logged, report, sequences, settings, trained
from transformers import Trainer, TrainingArguments, set_seed

from accelerate import Accelerator


def _shards(count: int, shards: int, read: list[int] | None = None) -> Any:
    """Return a stream of the library datasets over as many shards, which notes the rows that are read."""
    rows = [{name: tensor.tolist() for name, tensor in row.items()} for row in sequences(count)]
    numbered = [{"number": number, **row} for number, row in enumerate(rows)]

    def note(row: dict[str, Any]) -> dict[str, Any]:
        if read is not None:
            read.append(row["number"])
        return {name: value for name, value in row.items() if name != "number"}

    return Dataset.from_list(numbered).to_iterable_dataset(num_shards=shards).map(note, remove_columns="number")


def _trainer(name: str, train: Any = None, evaluate: Any = None, **more: Any) -> Trainer:
    set_seed(7)
    return Trainer(
        model=llama(),
        args=TrainingArguments(**settings(name, per_device_eval_batch_size=8 // WORLD, max_steps=3, **more)),
        train_dataset=sequences(24) if train is None else train,
        eval_dataset=sequences(16, seed=2) if evaluate is None else evaluate,
    )


def _found(trainer: Trainer) -> dict[str, Any]:
    trainer.train()
    return {
        **logged(trainer, losses="loss"),
        "evaluation": trainer.evaluate()["eval_loss"],
        **trained(trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)),
    }


def _streamed(dispatch: bool) -> dict[str, Any]:
    read: list[int] = []
    train = _shards(24, 4, read)
    found = _found(_trainer("streamed", train=train, accelerator_config={"dispatch_batches": dispatch}))
    return {**found, "read": len(read)}


def _compiled() -> dict[str, Any]:
    return _found(_trainer("compiled", torch_compile=True, torch_compile_backend="eager"))


def _subclassed() -> dict[str, Any]:
    """Train with an Accelerator whose class overrides what prepare and backward are made of."""
    called: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return getattr(Accelerator, name)(self, *args, **kwargs)

        return method

    names = ("prepare_model", "prepare_data_loader", "prepare_optimizer", "backward")
    ours = type("Ours", (Accelerator,), {name: noted(name) for name in names})
    theirs = transformers.trainer.Accelerator
    transformers.trainer.Accelerator = ours
    try:
        found = _found(_trainer("subclassed"))
    finally:
        transformers.trainer.Accelerator = theirs
    return {**found, "called": sorted(set(called)), "backward": called.count("backward")}


def _pickled() -> dict[str, Any]:
    """Pickle a trainer with its Accelerator, and train with what comes back."""
    return _found(pickle.loads(pickle.dumps(_trainer("pickled"))))


if __name__ == "__main__":
    report(
        {
            "pickled": _pickled(),  # before others: the original's shared state is not pickled once loaders were read
            "stream evaluation": _found(_trainer("stream", evaluate=Stream(66 if WORLD == 1 else 16, seed=2))),
            "dispatched stream": _streamed(True),
            "sharded stream": _streamed(False),
            "compiled": _compiled(),
            "subclassed": _subclassed(),
        }
    )
