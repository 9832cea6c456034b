"""The counts of --mx.health_every as an op: a kernel on CUDA, the reference on a CPU."""

import torch

from mxfp8_titan.format import ALIGNMENT_COUNTS
from mxfp8_titan.kernels import alignment_counts as kernels
from mxfp8_titan.kernels.launch import register_op
from mxfp8_titan.reference import alignment_counts as reference

register_op(
    "alignment_counts(Tensor x, Tensor? group_ends, Tensor phase, str rounding, int samples) -> Tensor",
    kernels.alignment_counts,
    lambda x, group_ends, phase, rounding, samples: x.new_empty((samples, ALIGNMENT_COUNTS), dtype=torch.float32),
    cpu=reference.alignment_counts,
)

alignment_counts = torch.ops.mxfp8_titan.alignment_counts.default
