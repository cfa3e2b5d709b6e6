"""Trains with a script that diffusers or transformers publishes, unmodified, as its README says, and goes on.

`ACCEL_SCRIPTS` names a folder that has the script somewhere in it. A script that the installed libraries do not fit
is not run, and why is what is found.
"""

import json
import os
import random
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from datasets import Dataset
from models import hash_of
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import BertConfig, BertModel, CLIPTextConfig, CLIPTextModel, CLIPTokenizer, PreTrainedTokenizerFast

OUTPUT, PICTURES, MODEL = Path("model"), Path("pictures"), Path("start")
LINES = [line.strip() for line in Path(os.__file__).with_name("LICENSE.txt").read_text().splitlines() if line.strip()]
SPECIAL = ["<|startoftext|>", "<|endoftext|>"]
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class Script(NamedTuple):
    """How a script is called.

    Attributes:
        makes: Functions of this module that write what it reads.
        words: Its arguments.
        first: Those of the first run.
        then: Those of the run that goes on from a checkpoint.
    """

    makes: tuple[str, ...]
    words: str
    first: str
    then: str


DRAWN = f"--output_dir {OUTPUT} --train_data_dir {PICTURES} --resolution 16 --checkpoints_total_limit 2"
TUNED = (
    f"{DRAWN} --pretrained_model_name_or_path {MODEL} --gradient_accumulation_steps 2 --seed 7 --lr_warmup_steps 0"
    # Pictures are flipped by torch's generator, which noise in the loop would share without a worker.
    " --dataloader_num_workers 1"
)
ALONE = "--dataloader_num_workers 0 --max_train_steps 2"
"""Words of the phases `alone` and `ahead`: data and loop share a process, and so torch's generator."""

READ = (
    f"--output_dir {OUTPUT} --model_name_or_path {MODEL} --learning_rate 1e-3 --seed 7 --checkpointing_steps 3 "
    f"--per_device_train_batch_size {4 // WORLD} --per_device_eval_batch_size 3"
    # On several ranks they wait for one another after `end_training`, which fails on both sides.
    + " --with_tracking --report_to tensorboard"
    * (WORLD == 1)
)
SCRIPTS = {
    "train_unconditional": Script(
        ("pictures", "unet"),
        f"{DRAWN} --model_config_name_or_path {MODEL} --cache_dir cache --train_batch_size 2 --eval_batch_size 1 "
        "--save_images_epochs 1 --save_model_epochs 1 --ddpm_num_inference_steps 3 --lr_warmup_steps 2 --use_ema "
        "--checkpointing_steps 3",
        "--num_epochs 2",
        "--num_epochs 4 --resume_from_checkpoint latest",
    ),
    "train_text_to_image": Script(
        ("pictures", "captions", "pipeline"),
        f"{TUNED} --use_ema --random_flip --center_crop --train_batch_size 2 --gradient_checkpointing "
        "--learning_rate 1e-3 --max_grad_norm 1 --lr_scheduler constant --checkpointing_steps 3 --cache_dir cache",
        "--max_train_steps 8",
        "--max_train_steps 12 --resume_from_checkpoint latest",
    ),
    "textual_inversion": Script(
        ("pictures", "pipeline"),
        f"{TUNED} --learnable_property object --placeholder_token <toy> --initializer_token the --train_batch_size 1 "
        "--repeats 2 --learning_rate 5e-4 --scale_lr --lr_scheduler constant --checkpointing_steps 3 --save_steps 5",
        "--max_train_steps 7",
        "--max_train_steps 12 --resume_from_checkpoint latest --save_as_full_pipeline",
    ),
    "run_glue_no_trainer": Script(
        ("bert", "sentences"),
        f"{READ} --train_file train.csv --validation_file validation.csv --max_length 24",
        "--num_train_epochs 2",
        f"--num_train_epochs 3 --resume_from_checkpoint {OUTPUT / 'step_6'}",
    ),
    "run_ner_no_trainer": Script(
        ("bert", "tags"),
        f"{READ} --train_file train.json --validation_file validation.json --max_length 24",
        "--num_train_epochs 2",
        f"--num_train_epochs 3 --resume_from_checkpoint {OUTPUT / 'step_6'}",
    ),
}


def pictures() -> None:
    """Write pictures of noise."""
    PICTURES.mkdir()
    generator = numpy.random.default_rng(0)
    for number in range(13):
        pixels = generator.integers(0, 255, (20, 20, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(PICTURES / f"{number:02}.png")


def captions() -> None:
    """Write what the pictures show."""
    rows = [{"file_name": path.name, "text": LINES[number]} for number, path in enumerate(sorted(PICTURES.iterdir()))]
    (PICTURES / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def unet() -> None:
    """Write the configuration of a small model."""
    from diffusers import UNet2DModel  # the environment of a script of transformers may have no diffusers

    UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).save_config(MODEL)


def pipeline() -> None:
    """Write a small Stable Diffusion with random weights, and a tokenizer of characters and one word."""
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    # Training a tokenizer gives another one each time.
    characters = sorted({*"".join(LINES).lower()} - {" "})
    pieces = [*SPECIAL, *characters, *(f"{each}</w>" for each in characters), "th", "the</w>"]
    folder = MODEL / "tokenizer"
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({piece: index for index, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e</w>\n")
    tokenizer = CLIPTokenizer.from_pretrained(str(folder), model_max_length=16)
    text = CLIPTextConfig(
        vocab_size=len(pieces), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=4,
        cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    autoencoder = AutoencoderKL(block_out_channels=(8, 16), norm_num_groups=4, sample_size=16, **blocks)
    StableDiffusionPipeline(
        autoencoder, CLIPTextModel(text), tokenizer, unet, DDPMScheduler(num_train_timesteps=100, clip_sample=False),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained(MODEL)  # fmt: skip


def bert() -> None:
    """Write a small BERT with random weights, a tokenizer of the words of Python's license, and metrics."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = [*names, *sorted({word for line in LINES for word in line.split()})]
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    kinds = ("pad", "unk", "cls", "sep", "mask")
    PreTrainedTokenizerFast(
        tokenizer_object=words, **{f"{kind}_token": name for kind, name in zip(kinds, names, strict=True)}
    ).save_pretrained(MODEL)
    size = {"vocab_size": len(vocabulary), "hidden_size": 16, "intermediate_size": 32}
    BertModel(BertConfig(num_hidden_layers=2, num_attention_heads=2, **size)).save_pretrained(MODEL)
    for metric in (Path(__file__).parent / "metrics").glob("*.py"):
        Path(metric.stem).mkdir()
        shutil.copy(metric, metric.stem)


def sentences() -> None:
    """Write lines of the license, and whether each is long."""
    for name, lines in (("train", LINES[:19]), ("validation", LINES[30:41])):
        labels = ["long" if len(line) > 60 else "short" for line in lines]
        Dataset.from_dict({"sentence1": lines, "sentence2": lines[::-1], "label": labels}).to_csv(f"{name}.csv")


def tags() -> None:
    """Write words of the license, and which of them are names."""
    for name, lines in (("train", LINES[:19]), ("validation", LINES[30:41])):
        tokens = [line.split() for line in lines]
        kinds = [["B-NAME" if word.istitle() else "O" for word in row] for row in tokens]
        Dataset.from_dict({"tokens": tokens, "ner_tags": kinds}).to_json(f"{name}.json")


def read_ahead() -> None:
    """Let torch's loaders read one batch ahead, as those of the original do."""
    plain = DataLoader.__iter__

    def ahead(loader: DataLoader[object]) -> Iterator[object]:
        batches = plain(loader)
        here = next(batches)
        for following in batches:
            yield here
            here = following
        yield here

    DataLoader.__iter__ = ahead  # type: ignore[method-assign, assignment]


def main() -> None:
    """Run one phase, and print scalars, files and digests of weights, or why the script does not fit."""
    name, phase = sys.argv[1:]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    first = os.environ.get("RANK", "0") == "0"
    chosen = SCRIPTS[name]
    script = str(next(Path(os.environ["ACCEL_SCRIPTS"]).rglob(f"{name}.py")))
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)
    try:
        runpy.run_path(script, run_name="imported")
    except (ImportError, RuntimeError) as fault:  # torchvision that another torch was built for raises the second
        print(json.dumps({"unfit": f"{name}.py: {fault}".splitlines()[0]}))
        return
    if phase == "make":
        for make in chosen.makes if first else ():
            globals()[make]()
    else:
        if phase == "ahead" and find_spec("accel_core"):
            read_ahead()
        words = {"train": chosen.first, "resume": chosen.then}.get(phase, ALONE)
        sys.argv = [script, *chosen.words.split(), *words.split()]
        runpy.run_path(script, run_name="__main__")
    if first:
        print("\n" + json.dumps(found()))


def found() -> dict[str, object]:
    """Return what the runs so far left."""
    scalars: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(OUTPUT.glob("**/events*"), key=lambda path: path.stat().st_mtime):
        events = EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            logged = [(event.step, event.value) for event in events.Scalars(tag)]
            scalars.setdefault(f"{path.parent.relative_to(OUTPUT)} {tag}", []).extend(logged)
    files = sorted(str(path.relative_to(OUTPUT)) for path in OUTPUT.rglob("*") if path.is_file())
    return {
        "scalars": scalars,
        "files": [name for name in files if not re.search(r"^logs/|events\.out|/\d+\.\d+/", name)],  # of trackers
        "weights": {
            name: hash_of(sorted(load_file(OUTPUT / name).items())) for name in files if name.endswith("safetensors")
        },
        "results": {name: json.loads((OUTPUT / name).read_text()) for name in files if name == "all_results.json"},
    }


if __name__ == "__main__":
    main()
