"""`python -m mxfp8_titan.train` (under torchrun for several processes): torchtitan's own main with this plugin's
hook already given, usable without a GPU, and with one clear line for a job it refuses.

On a GPU `-m torchtitan.train` with the hook on the command line or in the TOML trains the same.

Without a GPU, torch draws the same initial values on every rank, so that with two processes one half of a sharded
weight equals the other. Comparisons on a CPU start from a seed checkpoint made by one process.
"""

import logging
import os
import sys
from typing import TYPE_CHECKING, NoReturn

import torch

from mxfp8_titan.job_args import add_config_hook

if TYPE_CHECKING:
    from torchtitan.config import JobConfig

REFUSALS = (ValueError, TypeError, OSError, ImportError)
"""What a mistake in a job raises before it starts."""


def main() -> None:
    """Check the job on the command line, then train it."""
    prepare_host()
    check_or_refuse(parse_or_refuse(sys.argv[1:]))
    import torchtitan.train

    from mxfp8_titan.trainer import ObservedTrainer

    torchtitan.train.main(ObservedTrainer)


def prepare_host() -> None:
    """What must be in place before torchtitan is imported: its arguments, defaults of a single process, the CPU."""
    try:
        # torchtitan.config binds sys.argv when it is imported.
        sys.argv[1:] = add_config_hook(sys.argv[1:])
    except REFUSALS as error:
        refuse(error)
    # What torchrun would set for a single process; port 0 takes a free one.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    # torchtitan warns that the path which asks for the local tokenizer does not exist; it is not meant to.
    logging.getLogger().addFilter(lambda record: "path local_text does not exist" not in record.getMessage())
    if not torch.cuda.is_available():
        # It warns that experts run one by one there, in words that read as a failure.
        logging.getLogger().addFilter(lambda record: "Failed to use grouped mm" not in record.getMessage())
        from mxfp8_titan import cpu_host

        cpu_host.install()


def parse_or_refuse(args: list[str]) -> "JobConfig":
    """The job's configuration. Flags or a TOML that torchtitan cannot take end here, with exit code 2."""
    from mxfp8_titan import preflight

    try:
        return preflight.parse(args)
    except REFUSALS as error:
        refuse(error)


def check_or_refuse(job_config: "JobConfig") -> None:
    """End here, with one line and exit code 2, for a job that would fail after start-up."""
    from mxfp8_titan import preflight

    try:
        preflight.check(job_config)
    except REFUSALS as error:
        refuse(error)


def refuse(error: Exception) -> NoReturn:
    """Print `error` on one line and exit with code 2."""
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f" (rank {rank})"
    print(f"error{where}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
