"""Two processes of one job on one GPU: what tensors and kernels do is a GPU's, what carries them between is gloo.

NCCL refuses two ranks on one GPU. So this covers sharding, resharding, dispatch and checkpoints of two ranks, and says
nothing about NCCL, overlap or speed. As an entry, `-m tests.train.shared_gpu`, it trains as mxfp8_titan.train does.
"""

import os

import torch

from mxfp8_titan.cpu_host import sum_gradients_as_gloo_can


def used(processes: int) -> bool:
    """Whether this machine has one GPU for that many processes."""
    return processes > 1 and torch.cuda.device_count() == 1


def install() -> None:
    """Put this process on the only GPU, gloo where torch would take NCCL, and plain sums into FSDP2's reductions."""
    from torch.distributed import Backend

    os.environ["LOCAL_RANK"] = "0"
    Backend.default_device_backend_map["cuda"] = "gloo"
    sum_gradients_as_gloo_can()


if __name__ == "__main__":
    install()
    from mxfp8_titan.train import main

    main()
