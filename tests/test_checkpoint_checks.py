"""Checkpoints that a job cannot go on from, refused before it starts."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.distributed import ParallelDims

from mxfp8_titan import checkpoint_checks
from mxfp8_titan.preflight import parse

WEIGHTS = {"model": torch.ones(2)}
STATE = {"optimizer": {"lr": 1.0}, "lr_scheduler": {"last_epoch": 3}, "train_state": {"step": 3}}


class Text(IterableDataset):
    """Numbers without an end, whose place is known."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while True:
            self.place += 1
            yield self.place

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def _loader(workers, ranks=1):
    """The state that the loaders of so many ranks put into a checkpoint."""
    states = {}
    for rank in range(ranks):
        loader = ParallelAwareDataloader(Text(), rank, ranks, num_workers=workers, batch_size=1)
        next(iter(loader))
        states |= loader.state_dict()
    return {"dataloader": states}


def _save(folder, step, state):
    dcp.save(WEIGHTS | state, checkpoint_id=folder / "checkpoint" / f"step-{step}", no_dist=True)


def _check(folder, *flags, ranks=1):
    job = parse([f"--job.dump_folder={folder}", "--checkpoint.enable", *flags])
    degrees = ParallelDims(dp_shard=ranks, dp_replicate=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=ranks)
    checkpoint_checks.check(job, degrees)


def _workers(number):
    return f"--training.dataloader.num_workers={number}"


@pytest.mark.parametrize("saved", [0, 1])
@pytest.mark.parametrize("asked", [0, 1, 2])
def test_a_loader_goes_on_with_as_many_workers_as_it_was_saved_with(saved, asked, tmp_path):
    _save(tmp_path, 3, STATE | _loader(saved))
    if asked == saved:
        _check(tmp_path, _workers(asked))
        return
    with pytest.raises(
        ValueError, match=f"num_workers is {asked} and .*step-3 was saved with {saved}.*; take {saved}, or"
    ):
        _check(tmp_path, _workers(asked))
    _check(tmp_path, _workers(asked), "--checkpoint.exclude_from_loading=dataloader")


def test_a_loader_that_does_not_say_its_workers_is_left_to_the_host(tmp_path):
    _save(tmp_path, 3, STATE | {"dataloader": {"dp_rank_0": pickle.dumps({}), "world_size": 1}})
    _check(tmp_path, _workers(1))


@pytest.mark.parametrize("state", [None, {}, {"position": 5}, {"dp_rank_0": pickle.dumps([5])}])
def test_a_loader_of_another_kind_is_left_to_the_host(state, tmp_path):
    _save(tmp_path, 3, STATE | {"dataloader": state})
    _check(tmp_path, _workers(1))


def test_a_job_that_writes_a_seed_checkpoint_loads_none(tmp_path):
    _save(tmp_path, 10, {})
    _check(tmp_path, "--checkpoint.create_seed_checkpoint", "--checkpoint.load_step=7")


def test_a_step_with_weights_alone_is_not_gone_on_from(tmp_path):
    _save(tmp_path, 3, STATE | _loader(0))
    _save(tmp_path, 10, {})
    with pytest.raises(
        ValueError, match="step-10 holds no optimizer, lr_scheduler, dataloader, train_state.*last_save_mod"
    ):
        _check(tmp_path)
    _check(tmp_path, "--checkpoint.load_step=3")
    # What the message offers: its weights, in a new folder.
    start = f"--checkpoint.initial_load_path={tmp_path / 'checkpoint' / 'step-10'}"
    _check(tmp_path / "new", start)
    with pytest.raises(ValueError, match="step-10 holds no optimizer"):
        _check(tmp_path / "new", start, "--checkpoint.no-initial_load_model_only")


def test_the_seed_checkpoint_holds_weights_alone_and_is_begun_from(tmp_path):
    _save(tmp_path, 0, {})
    _check(tmp_path)


def test_a_hugging_face_export_as_the_last_step_is_not_gone_on_from(tmp_path):
    _save(tmp_path, 3, STATE | _loader(0))
    export = tmp_path / "checkpoint" / "step-10"
    export.mkdir()
    (export / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="step-10 holds no optimizer.*step-10 --checkpoint.initial_load_in_hf takes"):
        _check(tmp_path)
    # What the message offers, and half of it.
    start = f"--checkpoint.initial_load_path={export}"
    _check(tmp_path / "new", start, "--checkpoint.initial_load_in_hf")
    with pytest.raises(ValueError, match="no .metadata. A Hugging Face folder needs --checkpoint.initial_load_in_hf"):
        _check(tmp_path / "new", start)


def test_a_step_whose_saving_was_cut_short_does_not_count_and_is_refused_by_number(tmp_path):
    _save(tmp_path, 3, STATE | _loader(0))
    (tmp_path / "checkpoint" / "step-6").mkdir()
    _check(tmp_path)
    with pytest.raises(ValueError, match="step-6 is no whole checkpoint .no .metadata.: its saving was cut short"):
        _check(tmp_path, "--checkpoint.load_step=6")


def test_data_parallel_ranks_are_as_many_as_saved(tmp_path):
    _save(tmp_path, 3, STATE | _loader(0, ranks=2))
    _check(tmp_path, ranks=2)
    with pytest.raises(ValueError, match="step-3 was saved by 2 data-parallel ranks and this job has 4"):
        _check(tmp_path, ranks=4)
    _check(tmp_path, "--checkpoint.exclude_from_loading=dataloader", ranks=4)


def test_a_typo_among_what_is_not_loaded_is_refused(tmp_path):
    message = "exclude_from_loading names 'dataloder', needs some of: model, optimizer.* Did you mean dataloader"
    with pytest.raises(ValueError, match=message):
        _check(tmp_path, "--checkpoint.exclude_from_loading=dataloder")
