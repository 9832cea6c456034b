"""The moves of tokens to the order of experts and back, as ops: kernels on CUDA, the reference on a CPU."""

import torch

from mxfp8_titan.kernels import permute as kernels
from mxfp8_titan.kernels.launch import register_op
from mxfp8_titan.reference import permute as reference

_SCHEMAS = {
    "gather_rows": "(Tensor x, Tensor slot, int top_k, Tensor? scale) -> Tensor",
    "sum_rows": "(Tensor rows, Tensor row, int top_k, Tensor? scale, Tensor? base) -> Tensor",
    "gather_rows_backward": "(Tensor drows, Tensor x, Tensor row, int top_k, Tensor scale) -> (Tensor, Tensor)",
}
_FAKES = {
    "gather_rows": lambda x, slot, top_k, scale: x.new_empty((slot.shape[0], x.shape[1])),
    "sum_rows": lambda rows, row, top_k, scale, base: rows.new_empty((rows.shape[0] // top_k, rows.shape[1])),
    "gather_rows_backward": lambda drows, x, row, top_k, scale: (x.new_empty(x.shape), scale.new_empty(scale.shape)),
}

for _name, _schema in _SCHEMAS.items():
    register_op(_name + _schema, getattr(kernels, _name), _FAKES[_name], cpu=getattr(reference, _name))

gather_rows = torch.ops.mxfp8_titan.gather_rows.default
sum_rows = torch.ops.mxfp8_titan.sum_rows.default
gather_rows_backward = torch.ops.mxfp8_titan.gather_rows_backward.default
