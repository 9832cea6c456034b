"""What is live when a training step needs most GPU memory, by where it was allocated.

    python -m mxfp8_titan.bench.memory [--step S] [--ranks N] [--json FILE] [--commit C] --job.config_file ... [flags]

Trains the job on one GPU and records the allocator's history of step S. With --ranks N the job is rank 0 of N, the
others in name only: an all-gather copies this rank's shard into its place and the shard negated into every other's, a
reduce-scatter returns this rank's part, all else does nothing. Sizes and lifetimes are then those of N GPUs; losses
mean nothing, and speeds leave out communication. Shards by FSDP2 only.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mxfp8_titan.bench.results import environment, markdown_table
from mxfp8_titan.train import check_or_refuse, parse_or_refuse, prepare_host

GIB = 2**30
OURS = ("mxfp8_titan/", "torchtitan/", "torchinductor", "_fully_shard/", "/optim/")
"""Parts of the names of files that say what an allocation is for; frames of others do not."""
FRAMES = 3
"""Of those, innermost first, that an allocation is known by."""
PRINTED = 40


@dataclass(frozen=True)
class Live:
    """Tensors of one place and size. `bytes` of each."""

    where: str
    bytes: int
    count: int


@dataclass(frozen=True)
class Peak:
    """Bytes. `older`: of `before`, what was allocated before the step, those still allocated."""

    allocated: int
    before: int
    older: int
    live: list[Live]
    """Allocated in the step, largest sum first."""


def main() -> None:
    """Train, record, print.

    Raises: SystemExit without a GPU, and where the job has no such step or is refused.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=int, default=6, help="the step that is recorded (default 6)")
    parser.add_argument("--ranks", type=int, default=1, help="how many the job is to take itself for (default 1)")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--commit", help="what the results name, for a copy of the tree without its history")
    given, job = parser.parse_known_args()
    if not torch.cuda.is_available():
        sys.exit("error: this records a GPU's allocator, and there is no GPU")
    try:
        facts = {**environment(given.commit), "ranks": given.ranks}
    except ValueError as error:
        sys.exit(f"error: {error}")
    sys.argv[1:] = job
    prepare_host()
    job_config = parse_or_refuse(sys.argv[1:])
    check_or_refuse(job_config)
    if not 1 <= given.step <= job_config.training.steps:
        sys.exit(f"error: --step is {given.step}, the job has steps 1 to {job_config.training.steps}")
    if given.ranks > 1:
        stand_in_for_ranks(given.ranks)
    peak, reserved = record(given.step)
    print(
        f"step {given.step}: {peak.allocated / GIB:.2f} GiB at the peak, {peak.older / GIB:.2f} of them older than the "
        f"step; {reserved / GIB:.2f} GiB reserved\n"
    )
    cells = [(f"{x.bytes * x.count / GIB:.2f}", f"{x.count} x {x.bytes / 2**20:.1f}", x.where) for x in peak.live]
    print(markdown_table(("GiB", "MiB", "allocated in"), cells[:PRINTED]))
    if given.json:
        given.json.write_text(json.dumps({**facts, "reserved": reserved, **asdict(peak)}, indent=1) + "\n")


def record(step: int) -> tuple[Peak, int]:
    """(peak of that step, bytes reserved by its end) of the job on the command line."""
    import torchtitan.train
    from torchtitan.train import Trainer

    found = []

    class Watched(Trainer):
        def train_step(self, data_iterator: Iterator) -> None:
            if self.step != step:
                super().train_step(data_iterator)
                return
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.memory._record_memory_history(enabled="all", stacks="python", max_entries=10**6)
            super().train_step(data_iterator)
            torch.cuda.synchronize()
            events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
            torch.cuda.memory._record_memory_history(enabled=None)
            found.append((peak_of(events, before), torch.cuda.memory_reserved()))

    torchtitan.train.main(Watched)
    return found[0]


def peak_of(events: list[dict], before: int) -> Peak:
    """The moment of most memory in the allocator's history.

    events: of one device, as torch.cuda.memory._snapshot has them
    before: bytes allocated when recording began
    """
    now, most, last = before, before, -1
    for number, event in enumerate(events):
        now += _change(event)
        if now > most:
            most, last = now, number
    live, older = {}, before
    for event in events[: last + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_completed" and live.pop(event["addr"], None) is None:
            older -= event["size"]
    counts: dict[tuple[str, int], int] = {}
    for event in live.values():
        key = where(event.get("frames", [])), event["size"]
        counts[key] = counts.get(key, 0) + 1
    groups = [Live(*key, count) for key, count in counts.items()]
    return Peak(most, before, older, sorted(groups, key=lambda group: -group.bytes * group.count))


def _change(event: dict) -> int:
    """Bytes by which an event changes what is allocated."""
    return {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)


def where(frames: list[dict]) -> str:
    """The innermost frames that say something, outermost last."""
    named = [frame for frame in frames if any(part in frame["filename"] for part in OURS)][:FRAMES]
    names = ["/".join(frame["filename"].split("/")[-2:]) + f":{frame['line']} {frame['name']}" for frame in named]
    return " < ".join(names) or "autograd"


def stand_in_for_ranks(ranks: int) -> None:
    """Make this process rank 0 of `ranks`, and collectives what this file's docstring says, for good."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def operands(args: tuple, kwargs: dict) -> list[torch.Tensor]:
        named = [kwargs[name] for name in ("output_tensor", "output", "input_tensor", "input") if name in kwargs]
        return named or list(args[:2])

    def all_gather(*args, **kwargs) -> None:
        out, shard = operands(args, kwargs)
        parts = out.view(ranks, -1)
        parts[0].copy_(shard.reshape(-1))
        # Negated, so that a router's two halves do not tie.
        torch.neg(parts[:1].expand(ranks - 1, -1), out=parts[1:])

    def reduce_scatter(*args, **kwargs) -> None:
        part, whole = operands(args, kwargs)
        part.copy_(whole.view(ranks, *part.shape)[0])

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    # FSDP2's names for them in torch 2.11, and in 2.13.
    dist.all_gather_into_tensor = dist.all_gather_single = all_gather
    dist.reduce_scatter_tensor = dist.reduce_scatter_single = reduce_scatter


if __name__ == "__main__":
    main()
