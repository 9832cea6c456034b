import json
import multiprocessing
import sysconfig
from pathlib import Path

import pytest
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset

from mxfp8_titan import local_text, plugin  # noqa: F401 - registers the dataset


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "site-packages").mkdir()
    for i in range(20):
        (folder / "sub" / f"{i:02}.txt").write_text(f"This is text number {i}. " * 50)
    (folder / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (folder / "empty.py").write_text("  \n")
    (folder / "site-packages" / "other.py").write_text("not this")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / ".#lock.py").symlink_to("/nonexistent/target")
    local_text._read_texts.cache_clear()
    yield folder
    local_text._read_texts.cache_clear()


def test_the_default_text_is_the_standard_library():
    assert DATASETS["local_text"].path == sysconfig.get_path("stdlib")
    dataset = local_text.load(DATASETS["local_text"].path)
    assert len(dataset) > 500
    assert sum(map(len, dataset["text"])) > 5e6


def test_a_folder_gives_its_utf8_texts_in_a_fixed_shuffled_order(texts):
    first = local_text.load(str(texts))["text"]
    local_text._read_texts.cache_clear()
    assert local_text.load(str(texts))["text"] == first
    assert len(first) == 20
    assert list(first) != sorted(first)


def test_long_files_are_cut_at_line_ends_into_pieces_that_lose_nothing(texts):
    long = "".join(f"line {i}\n" for i in range(5000)) + "no end of line"
    (texts / "long.py").write_text(long)
    pieces = local_text.load(str(texts / "long.py"))["text"]
    assert len(pieces) > 10
    assert all(4096 <= len(piece) < 4096 + 20 and piece.endswith("\n") for piece in pieces if "no end" not in piece)
    lines = [line for piece in pieces for line in piece.splitlines()]
    assert sorted(lines) == sorted(long.splitlines())


def test_a_single_file_is_a_dataset_too(texts):
    assert len(local_text.load(str(texts / "sub" / "03.txt"))) == 1


@pytest.mark.parametrize("name", ["no/such/folder", "site-packages/none"])
def test_a_path_without_text_is_named(name, texts):
    with pytest.raises(ValueError, match=f"training.dataset_path=.*{name} holds no text.*UTF-8 files ending in .py"):
        local_text.load(str(texts / name))


def test_the_tokenizer_is_trained_once_and_round_trips(texts):
    folder = local_text.tokenizer_folder(str(texts), vocab_size=400)
    trained = (texts.parent / "cache").rglob("tokenizer.json")
    stamp = next(trained).stat().st_mtime_ns
    assert local_text.tokenizer_folder(str(texts), vocab_size=400) == folder
    assert next((texts.parent / "cache").rglob("tokenizer.json")).stat().st_mtime_ns == stamp
    tokenizer = HuggingFaceTokenizer(folder)
    assert tokenizer.get_vocab_size() <= 400
    text = "This is text ünicode \n\t 12"
    ids = tokenizer.encode(text, add_bos=True, add_eos=True)
    assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert tokenizer.decode(ids[1:-1]) == text


def test_other_text_or_another_size_has_another_tokenizer(texts):
    folder = local_text.tokenizer_folder(str(texts), vocab_size=400)
    assert local_text.tokenizer_folder(str(texts), vocab_size=300) != folder
    (texts / "more.txt").write_text("more")
    local_text._read_texts.cache_clear()
    assert local_text.tokenizer_folder(str(texts), vocab_size=400) != folder


def test_a_half_written_tokenizer_is_trained_again(texts):
    folder = local_text.tokenizer_folder(str(texts), vocab_size=400)
    (texts / folder / "tokenizer_config.json").unlink()
    (texts / folder / "tokenizer.json").write_text("{")
    assert local_text.tokenizer_folder(str(texts), vocab_size=400) == folder
    HuggingFaceTokenizer(folder)


def _folder_and_time(path):
    # A file that was written again while others waited has another modification time.
    folder = local_text.tokenizer_folder(path)
    return folder, (Path(folder) / "tokenizer.json").stat().st_mtime_ns


def test_processes_that_ask_at_once_get_one_tokenizer(texts):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        folders = pool.map(_folder_and_time, [str(texts)] * 3)
    assert len(set(folders)) == 1
    assert json.loads((Path(folders[0][0]) / "tokenizer_config.json").read_text())["bos_token"] == local_text.BOS


def test_torchtitan_s_loader_reads_it_per_rank_and_resumes(texts):
    tokenizer = HuggingFaceTokenizer(local_text.tokenizer_folder(str(texts), vocab_size=400))

    def loader(rank=0, world=1):
        return HuggingFaceTextDataset(
            "local_text", str(texts), tokenizer, seq_len=16, dp_rank=rank, dp_world_size=world
        )

    samples = [x["input"].tolist() for x, _ in loader()]
    halves = [[x["input"].tolist() for x, _ in loader(rank, 2)] for rank in (0, 1)]
    assert samples
    assert halves[0] != halves[1]
    whole = loader()
    iterator = iter(whole)
    head = [next(iterator)[0]["input"].tolist() for _ in range(3)]
    state = whole.state_dict()
    rest = loader()
    rest.load_state_dict(state)
    assert head + [x["input"].tolist() for x, _ in rest] == samples


def test_a_cache_folder_that_cannot_be_made_is_named(texts, monkeypatch):
    (texts.parent / "a file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(texts.parent / "a file" / "cache"))
    with pytest.raises(ValueError, match="cache folder .*a file.* cannot be made; set XDG_CACHE_HOME"):
        local_text.tokenizer_folder(str(texts))
