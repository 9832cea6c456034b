"""Training text without a download: the dataset `local_text` and a tokenizer trained from it.

The default text is the Python standard library's sources, tens of MB in a full CPython; another folder
or file is named by --training.dataset_path. The tokenizer is a byte-level BPE, trained on first use in a few
seconds and cached under the user's cache folder.
"""

import hashlib
import json
import os
import random
import sysconfig
from functools import lru_cache
from pathlib import Path

from datasets import Dataset
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.tools.logging import logger

DATASET = "local_text"
TOKENIZER_PATH = "local_text"
"""The value of model.hf_assets_path that asks for the tokenizer trained from the local text."""

SUFFIXES = (".py", ".txt", ".md", ".rst")
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", ".git", ".venv", "node_modules"}
VOCAB_SIZE = 2048
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
SHUFFLE_SEED = 0
PIECE_CHARACTERS = 4096
"""Files are cut at line ends into pieces of about this size: no batch is one odd file, and the loss is smooth."""


def register() -> None:
    """Add `local_text` to torchtitan's datasets."""
    DATASETS.setdefault(
        DATASET,
        DatasetConfig(path=sysconfig.get_path("stdlib"), loader=load, sample_processor=lambda sample: sample["text"]),
    )


def load(path: str) -> Dataset:
    """The text files under `path` in pieces of about 4096 characters, in a fixed shuffled order.

    path: a folder, or a single file
    Raises: ValueError when there is no text to read.
    """
    texts = _read_texts(path)
    pieces = [piece for text in texts for piece in _cut(text)]
    random.Random(SHUFFLE_SEED).shuffle(pieces)
    characters = sum(map(len, texts)) / 1e6
    logger.info(f"{DATASET}: {len(texts)} files in {len(pieces)} pieces, {characters:.1f} M characters from {path}")
    return Dataset.from_dict({"text": pieces})


def _cut(text: str) -> list[str]:
    """`text` in pieces that end with the first line end after PIECE_CHARACTERS, or at the end."""
    pieces, start = [], 0
    while start < len(text):
        line_end = text.find("\n", start + PIECE_CHARACTERS)
        end = len(text) if line_end < 0 else line_end + 1
        pieces.append(text[start:end])
        start = end
    return pieces


@lru_cache(maxsize=1)
def _read_texts(path: str) -> tuple[str, ...]:
    root = Path(path)
    if root.is_file():
        files = [root]
    else:
        files = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
            files += [Path(folder) / name for name in sorted(names) if name.endswith(SUFFIXES)]
    texts = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            # The standard library's own tests hold files in other encodings; editors leave dangling links.
            continue
        if text.strip():
            texts.append(text)
    if not texts:
        raise ValueError(
            f"training.dataset_path={path} holds no text for dataset {DATASET}: it needs an existing file, or a folder "
            f"with UTF-8 files ending in {', '.join(SUFFIXES)}"
        )
    return tuple(texts)


def tokenizer_folder(path: str, vocab_size: int = VOCAB_SIZE) -> str:
    """Folder with the tokenizer trained on the text under `path`; trained now if it is not cached.

    Several processes may ask at once: one trains, the others wait.

    vocab_size: entries, special tokens included
    Raises: ValueError as `load` does.
    """
    texts = _read_texts(path)
    digest = hashlib.sha256(f"{vocab_size} ".encode())
    for text in texts:
        digest.update(text.encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mxfp8_titan"
    if any(parent.exists() and not parent.is_dir() for parent in (cache, *cache.parents)):
        raise ValueError(f"the tokenizer's cache folder {cache} cannot be made; set XDG_CACHE_HOME to another folder")
    folder = cache / f"tokenizer-{vocab_size}-{digest.hexdigest()[:16]}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        # The config is put in place last, so a folder that has it is whole even after a kill.
        if not (folder / "tokenizer_config.json").exists():
            logger.info(f"training a {vocab_size}-entry tokenizer on {len(texts)} files, once, into {folder}")
            _train_tokenizer(texts, vocab_size, folder)
    return str(folder)


def _train_tokenizer(texts: tuple[str, ...], vocab_size: int, folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    unfinished = folder / "unfinished.json"
    unfinished.write_text(json.dumps({"bos_token": BOS, "eos_token": EOS}))
    unfinished.replace(folder / "tokenizer_config.json")
