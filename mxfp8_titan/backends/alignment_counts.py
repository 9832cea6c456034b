"""The counts of --mx.health_every as an op: a kernel on CUDA, the reference on a CPU."""

import torch

from mxfp8_titan.kernels import alignment_counts as kernels
from mxfp8_titan.reference import alignment_counts as reference

COUNTS = reference.COUNTS

torch.library.define(
    "mxfp8_titan::alignment_counts",
    "(Tensor x, Tensor? group_ends, Tensor phase, str rounding, int samples) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.impl("mxfp8_titan::alignment_counts", "CUDA", kernels.alignment_counts)
torch.library.impl("mxfp8_titan::alignment_counts", "CPU", reference.alignment_counts)


@torch.library.register_fake("mxfp8_titan::alignment_counts")
def _(x, group_ends, phase, rounding, samples):
    return x.new_empty((samples, COUNTS), dtype=torch.float32)


alignment_counts = torch.ops.mxfp8_titan.alignment_counts.default
