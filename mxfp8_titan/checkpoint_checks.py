"""Whether a checkpoint that a job goes on from can be found and holds what this job asks of it, before processes start.

torchtitan 0.2.2 finds out after start-up, by "Missing key in checkpoint state_dict" or an assertion of the data loader.
"""

import pickle
import re
import warnings
from collections.abc import Collection
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from mxfp8_titan.job_config import did_you_mean

RESUMED = ("optimizer", "lr_scheduler", "dataloader", "train_state")
"""What torchtitan loads beside the weights, unless checkpoint.exclude_from_loading names it."""
ANEW = "--checkpoint.exclude_from_loading=dataloader begins the text anew"


def check(job_config: JobConfig, degrees: ParallelDims | None) -> None:
    """Refuse a checkpoint that the job cannot go on from.

    degrees: how the processes are split; None when that is not known
    Raises: ValueError that says what the checkpoint has, what the job needs, and how to go on.
    """
    settings = job_config.checkpoint
    # A seed checkpoint is written, and nothing is loaded.
    if not settings.enable or settings.create_seed_checkpoint:
        return
    for name in settings.exclude_from_loading:
        if name not in ("model", *RESUMED):
            raise ValueError(
                f"checkpoint.exclude_from_loading names {name!r}, needs some of: model, {', '.join(RESUMED)}."
                f"{did_you_mean(name, RESUMED)}"
            )
    folder = Path(job_config.job.dump_folder, settings.folder)
    if folder.is_dir():
        path = _saved_step(folder, settings.load_step)
        with_state = path is not None and path.name != "step-0"
    elif settings.initial_load_path:
        path = Path(settings.initial_load_path)
        if not path.is_dir():
            raise ValueError(f"checkpoint.initial_load_path is {path}, needs a folder that exists")
        if settings.initial_load_in_hf:
            return
        with_state = not settings.initial_load_model_only
        if not _is_distributed(path):
            raise ValueError(
                f"checkpoint.initial_load_path is {path}, needs a checkpoint: there is no .metadata. A Hugging Face "
                "folder needs --checkpoint.initial_load_in_hf"
            )
    else:
        return
    if with_state:
        # Fault tolerance may keep the loader's state elsewhere.
        elsewhere = ["dataloader"] if job_config.fault_tolerance.enable else []
        needed = [name for name in RESUMED if name not in (*settings.exclude_from_loading, *elsewhere)]
        _check_state(path, needed, job_config.training.dataloader.num_workers, degrees)


def _saved_step(folder: Path, step: int) -> Path | None:
    """The checkpoint that is loaded: of `step`, or for -1 the last whole one, if there is any."""
    if step != -1:
        path = folder / f"step-{step}"
        if not path.is_dir():
            found = ", ".join(sorted(path.name for path in folder.glob("step-*"))) or "none"
            raise ValueError(f"checkpoint.load_step is {step}, needs a checkpoint that exists in {folder}: {found}")
        return path
    whole = [path for path in folder.glob("step-*") if _is_distributed(path) or _is_hugging_face(path)]
    numbered = [path for path in whole if re.fullmatch(r"step-\d+", path.name)]
    return max(numbered, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def _is_distributed(path: Path) -> bool:
    return (path / ".metadata").is_file()


def _is_hugging_face(path: Path) -> bool:
    return (path / "model.safetensors.index.json").is_file()


def _check_state(path: Path, needed: Collection[str], workers: int, degrees: ParallelDims | None) -> None:
    exported = _is_hugging_face(path)
    if not _is_distributed(path) and not exported:
        raise ValueError(f"{path} is no whole checkpoint (no .metadata): its saving was cut short; take another step")
    keys = {} if exported else dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    missing = [name for name in needed if not any(key == name or key.startswith(f"{name}.") for key in keys)]
    # A loader that has nothing to keep leaves no key.
    if missing not in ([], ["dataloader"]):
        in_hf = " --checkpoint.initial_load_in_hf" if exported else ""
        raise ValueError(
            f"{path} holds no {', '.join(missing)}, and the job would go on from there: a run's last step is saved "
            "without (checkpoint.last_save_model_only). --checkpoint.load_step names an earlier one; in a new "
            f"job.dump_folder --checkpoint.initial_load_path={path}{in_hf} takes its weights alone"
        )
    ranks = [key for key in keys if key.startswith("dataloader.dp_rank_")]
    # Loaders other than torchtitan's are left to the host.
    if "dataloader" not in needed or not ranks:
        return
    with_data = degrees.dp_replicate * degrees.dp_shard if degrees is not None else len(ranks)
    if len(ranks) != with_data:
        raise ValueError(
            f"{path} was saved by {len(ranks)} data-parallel ranks and this job has {with_data}: where each was in the "
            f"text cannot be split anew; {ANEW}"
        )
    saved = _workers(path, ranks[0])
    if saved not in (None, workers):
        raise ValueError(
            f"training.dataloader.num_workers is {workers} and {path} was saved with {saved}: where those were in the "
            f"text cannot be split anew; take {saved}, or {ANEW}"
        )


def _workers(path: Path, key: str) -> int | None:
    """num_workers of the data loader whose state is saved under `key`; None for one that does not say it."""
    state = {key: b""}
    with warnings.catch_warnings():
        # That one process loads it alone.
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path, no_dist=True)
    # As the job itself reads it.
    loader = pickle.loads(state[key])
    if not isinstance(loader, dict):
        return None
    if "_num_yielded" in loader:
        return 0
    return loader.get("_snapshot", {}).get("_main_snapshot", {}).get("_num_workers")
