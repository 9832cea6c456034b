import pytest
import torch

from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.format import FLOOR, RCEIL


def _inputs(strided, device):
    def tensor(*shape):
        t = torch.randn(*shape, device=device)
        return t.mT.contiguous().mT if strided else t

    return tensor(96, 64), tensor(32, 64), tensor(96, 32), tensor(3, 32, 64)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_every_op_passes_torch_s_own_check_of_custom_ops(strided, out_dtype, device):
    x, w, dy, experts = _inputs(strided, device)
    ends = torch.tensor([32, 32, 70], dtype=torch.int32, device=device)
    calls = {
        REFERENCE.linear_y: (x, w, RCEIL),
        REFERENCE.linear_dx: (dy, w, FLOOR),
        REFERENCE.linear_dw: (dy, x, RCEIL),
        REFERENCE.grouped_y: (x, experts, ends, RCEIL),
        REFERENCE.grouped_dx: (dy, experts, ends, FLOOR),
        REFERENCE.grouped_dw: (dy, x, ends, RCEIL),
    }
    for op, args in calls.items():
        torch.library.opcheck(op, (*args, out_dtype))
