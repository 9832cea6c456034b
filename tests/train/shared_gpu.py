"""Two processes of one job on one GPU: what tensors and kernels do is a GPU's, what carries them between is gloo.

NCCL refuses two ranks on one GPU. So this covers sharding, resharding, dispatch and checkpoints of two ranks, and says
nothing about NCCL, overlap or speed. Pipelines are left out: nothing carries their sends. As an entry,
`-m tests.train.shared_gpu`, it trains as mxfp8_titan.train does.
"""

import os
from functools import partial

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from mxfp8_titan.cpu_host import sum_gradients_as_gloo_can

STAGED = ("_allgather_base_", "_reduce_scatter_base_", "allgather_", "allgather_into_tensor_coalesced_",
          "alltoall_base_", "reduce_scatter_tensor_coalesced_")  # fmt: skip
"""What gloo has for tensors on a CPU only, or lost there: an all-to-all ended both processes. It reduces and broadcasts
what lies on a GPU itself."""

_kernels = torch.library.Library("c10d", "IMPL")


def used(processes: int) -> bool:
    """Whether this machine has one GPU for that many processes."""
    return processes > 1 and torch.cuda.device_count() == 1


def install() -> None:
    """Put this process on the only GPU, gloo where torch would take NCCL, and plain sums into FSDP2's reductions."""
    from torch.distributed import Backend

    os.environ["LOCAL_RANK"] = "0"
    Backend.default_device_backend_map["cuda"] = "gloo"
    sum_gradients_as_gloo_can()
    for name in STAGED:
        _kernels.impl(name, partial(_through_the_host, getattr(torch.ops.c10d, name).default), "CUDA")


def _through_the_host(op, *args):
    """`op` on copies in the host's memory, waited for; its first argument, which it writes, gets its copies back."""
    copies = {}

    def on_host(t: torch.Tensor) -> torch.Tensor:
        return copies.setdefault(id(t), (t.cpu(), t))[0]

    result = op(*(tree_map_only(torch.Tensor, on_host, arg) for arg in args))
    *_, work = result if isinstance(result, tuple) else (result,)
    torch.distributed.Work.unbox(work).wait()
    originals = {id(copy): t for copy, t in copies.values()}
    for t in tree_leaves(args[0]):
        t.copy_(copies[id(t)][0])
    return tree_map_only(torch.Tensor, lambda copy: originals[id(copy)], result)


if __name__ == "__main__":
    install()
    from mxfp8_titan.train import main

    main()
