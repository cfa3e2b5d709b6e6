"""Loaders whose batches hold all micro batches of a step, and iterators over megatron-core's datasets."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_core.data import samplers
from accel_core.errors import ConfigurationError, PreparationError
from accel_megatron import library
from accel_megatron.run import MegatronRun, current

_SPLITS = 3


def batch_size_of(loader: Any) -> int | None:
    """Return the batch size of a loader, the samples of one micro batch; `None` if it has none."""
    if isinstance(loader, MegatronLMDummyDataLoader):
        size = loader.dataset_args.get("micro_batch_size")
        return size if isinstance(size, int) else None
    return samplers.batch_size_of(loader)


def enlarge(loader: DataLoader[Any], times: int) -> DataLoader[Any]:
    """Return a loader whose batches are `times` as large, so that each holds all micro batches of a step.

    Raises:
        PreparationError: The loader has a custom batch sampler.
    """
    if times == 1:
        return loader
    # Another batch sampler decides on its batches itself.
    plain = type(loader.batch_sampler) is BatchSampler or isinstance(loader.dataset, IterableDataset)
    if loader.batch_size is None or not plain:
        raise PreparationError(
            f"Batches of {times} micro batches need a loader with a batch_size; got a loader with a "
            f"{type(loader.batch_sampler).__name__}. Give it batch_size, or set num_micro_batches=1."
        )
    shared = {
        name: getattr(loader, name)
        for name in ("num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn",
                     "multiprocessing_context", "generator", "persistent_workers", "prefetch_factor")
    }  # fmt: skip
    if not isinstance(loader.dataset, IterableDataset):
        shared["sampler"] = loader.sampler
    return type(loader)(loader.dataset, batch_size=loader.batch_size * times, **shared)


def prepare_data_loader(accelerator: Any, dataloader: Any) -> Any:
    """Distribute a loader over the data-parallel ranks."""
    if isinstance(dataloader, MegatronLMDummyDataLoader):
        return dataloader.build_train_valid_test_data_iterators(accelerator)[0]
    return accelerator.prepare_data_loader(enlarge(dataloader, current().plugin.num_micro_batches or 1))


class DatasetIterator:
    """An endless iterator over this rank's batches of a megatron-core dataset; counts the samples that it consumed."""

    def __init__(self, run: MegatronRun, dataset: Sequence[Mapping[str, Any]], consumed: int = 0) -> None:
        self.dataset = dataset
        self.consumed = consumed
        self._micro: int = run.arguments.micro_batch_size
        self._parts = run.plugin.num_micro_batches or 1
        self._part, self._ranks = run.layout.part, run.layout.replicas

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """Return the next batch: this rank's samples of each global micro batch."""
        start = self.consumed
        self.consumed += self._micro * self._parts * self._ranks
        samples = []
        for part in range(self._parts):
            # One micro batch of all ranks is contiguous.
            first = start + (part * self._ranks + self._part) * self._micro
            # Data begin again: the length of a run is counted in steps.
            samples += [self.dataset[index % len(self.dataset)] for index in range(first, first + self._micro)]
        return {name: torch.stack([torch.as_tensor(one[name]) for one in samples]) for name in samples[0]}

    def state_dict(self) -> dict[str, int]:
        """Return how many samples the run has used."""
        return {"consumed": self.consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after the samples that a run has used."""
        self.consumed = state["consumed"]


class MegatronLMDummyDataLoader:
    """Takes the place of a loader over megatron-core's own datasets.

    Pass it to `prepare` three times: the results are the iterators over training, validation and test data.
    """

    def __init__(self, **dataset_kwargs: object) -> None:
        # Megatron's own defaults.
        self.dataset_args: dict[str, Any] = {"seed": 1234, "splits_string": "969, 30, 1", **dataset_kwargs}

    def set_megatron_data_args(self) -> None:
        """Add the arguments of the datasets to those of the run."""
        run = current()
        for name, value in self.dataset_args.items():
            setattr(run.arguments, name, value)

    def get_train_valid_test_datasets_provider(self, accelerator: object) -> Callable[..., Any]:
        """Return the function that builds the three datasets from the number of samples the run needs of each."""
        own = current().plugin.custom_megatron_datasets_provider_function
        return own or _datasets

    def build_train_valid_test_data_iterators(self, accelerator: object) -> tuple[Any, ...]:
        """Build the iterators over the three datasets."""
        run = current()
        self.set_megatron_data_args()
        provider = self.get_train_valid_test_datasets_provider(accelerator)
        # Scripts name those of training, and maybe of no others.
        used = [*(run.plugin.consumed_samples or []), 0, 0, 0][:_SPLITS]
        found = provider(_sizes(run))
        return tuple(
            None if dataset is None else DatasetIterator(run, dataset, consumed)
            for dataset, consumed in zip(found, used, strict=True)
        )


def _sizes(run: MegatronRun) -> list[int]:
    """Return how many samples of each dataset a run of known length needs."""
    arguments = run.arguments
    batch = arguments.global_batch_size
    steps = arguments.train_iters or (arguments.train_samples or 0) // batch
    if not steps:
        raise ConfigurationError(
            "A Megatron dataset needs the length of the run; got none. Set train_iters or train_samples of "
            "MegatronLMPlugin, or pass a MegatronLMDummyScheduler."
        )
    evaluations = (steps // arguments.eval_interval + 1) * arguments.eval_iters  # one more at the end
    return [steps * batch, evaluations * batch, arguments.eval_iters * batch]


def _datasets(sizes: list[int]) -> tuple[Any, ...]:
    """Build the datasets of a GPT.

    Raises:
        ConfigurationError: The kind of model needs a tokenizer for its datasets, or there is no data.
    """
    run = current()
    arguments = run.arguments
    if arguments.model_type_name != "gpt":
        raise ConfigurationError(
            f"megatron-core builds datasets without a tokenizer only for a GPT; got a {arguments.model_type_name}. "
            "Set custom_megatron_datasets_provider_function of MegatronLMPlugin."
        )
    datasets = library.core("datasets.gpt_dataset")
    paths = arguments.data_path
    if not paths:
        raise ConfigurationError(
            "A Megatron dataset is read from files; got no data_path. Pass the prefix of the file names."
        )
    config = datasets.GPTDatasetConfig(
        random_seed=arguments.seed,
        sequence_length=arguments.seq_length,
        blend=library.core("datasets.utils").get_blend_from_list(_listed(paths)),
        split=arguments.splits_string.replace(" ", ""),
        path_to_cache=arguments.data_cache_path,
        tokenizer=_Ending(arguments),
        reset_position_ids=arguments.reset_position_ids,
        reset_attention_mask=arguments.reset_attention_mask,
        eod_mask_loss=bool(arguments.eod_mask_loss),
        create_attention_mask=bool(arguments.reset_attention_mask),
    )
    builder = library.core("datasets.blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder(
        datasets.GPTDataset,
        sizes,
        lambda: True,
        config,  # every rank builds the datasets
    )
    return tuple(builder.build())


def _listed(paths: str | os.PathLike[str] | Iterable[object]) -> list[str]:
    return [os.fspath(paths)] if isinstance(paths, str | os.PathLike) else [str(path) for path in paths]


class _Ending:
    """The part of a tokenizer that a token dataset uses: the end-of-document token and the padding token."""

    def __init__(self, arguments: Namespace) -> None:
        end = arguments.eos_token_id if arguments.eod_token_id is None else arguments.eod_token_id
        self.eod = -1 if end is None else int(end)  # no token has this number
        self.pad = -1
        self.vocab_size = arguments.orig_vocab_size
        self.unique_identifiers = {"class": "accel", "eod": self.eod}
