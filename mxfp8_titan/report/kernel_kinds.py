"""Which kind of work a kernel does, by its name. Data: the first pattern that is found in a name decides.

Names as torch 2.11 to 2.13, Triton 3.6, NCCL 2.2x and CUDA 13 give them. Ours are the @triton.jit and
@gluon.jit functions under kernels/; a test holds that none of them is missing here.
"""

import re

GEMM_DENSE = "gemm_dense"
GEMM_GROUPED = "gemm_grouped"
GEMM_OWN = "gemm_own"
"""One kernel multiplies with groups and without, under one name."""
ATTENTION = "attention"
QUANTIZATION = "quantization"
COMMUNICATION = "communication"
OPTIMIZER = "optimizer"
ELEMENTWISE = "elementwise"
COPIES = "copies"
OTHER = "other"

TITLES = {
    GEMM_DENSE: "GEMM, dense",
    GEMM_GROUPED: "GEMM, grouped",
    GEMM_OWN: "GEMM, our kernel",
    ATTENTION: "attention",
    QUANTIZATION: "quantization",
    COMMUNICATION: "communication",
    OPTIMIZER: "optimizer",
    ELEMENTWISE: "elementwise",
    COPIES: "copies, gathers, sorts",
    OTHER: "other",
}
"""Every kind, in the order in which it is shown."""

GPU_KERNELS = (
    (COMMUNICATION, r"nccl|nvshmem|multimem|deep_?ep"),
    # Inductor's templates before its fused kernels, and both before everything that their names may quote.
    (GEMM_GROUPED, r"^triton_tem_.*grouped_mm"),
    (ATTENTION, r"^triton_tem_.*flex_(attention|decoding)"),
    (GEMM_DENSE, r"^triton_tem_|^triton_mm"),
    # Casts that Inductor fused (torchao's, for one) hold a maximum over a block or row.
    (QUANTIZATION, r"^triton_(poi|per|red)_.*(amax|float8)"),
    (ELEMENTWISE, r"^triton_(poi|per|red|for)_"),
    (GEMM_OWN, r"^_?aligned_gemm|^gemm_(of_rows|over_t)"),
    # One kernel computes silu(h1) * h3, or its gradient, and quantizes it.
    (
        QUANTIZATION,
        r"^_?(re)?quantize|^_?align(ed|ment)_|column_amax|merge_maxima|padded_group_ends|^(un)?swizzle|^_?swiglu",
    ),
    # Tokens to their experts and back.
    (COPIES, r"^(gather|sum|zero)_(rows|groups)"),
    # Attention is built from CUTLASS too.
    (ATTENTION, r"flash|fmha|sdpa|attention"),
    (GEMM_GROUPED, r"GroupProblemShape|grouped_?(gemm|mm)|group_?gemm"),
    (GEMM_DENSE, r"gemm|nvjet|xmma|cublas|splitK|gemv"),
    (OPTIMIZER, r"multi_tensor_apply|adam|sgd"),
    (COPIES, r"^Mem(cpy|set)|copy|chunk_cat|split_with_sizes|index|gather|scatter|embedding|fill_indices"),
    (COPIES, r"sort|scan|topk|FillFunctor"),
    (ELEMENTWISE, r"elementwise|reduce|softmax|nll_loss|norm|histogram|histc|Functor"),
)

CPU_OPERATORS = (
    (COMMUNICATION, r"^c10d::|^_c10d_functional|^gloo:|record_param_comms|^fsdp::"),
    (QUANTIZATION, r"^mxfp8_titan::"),
    (ATTENTION, r"attention"),
    (GEMM_GROUPED, r"grouped_mm"),
    (GEMM_DENSE, r"^aten::(mm|addmm|bmm|baddbmm|matmul|linear|_scaled_mm|_int_mm)$|mkldnn.*(linear|matmul)"),
    (OPTIMIZER, r"_fused_adam|_foreach_"),
    (COPIES, r"^aten::(copy_|clone|contiguous|to|_to_copy|cat|stack|index|_?index_put|gather|scatter|embedding|pad)"),
    (COPIES, r"^aten::(empty|new_|zeros|zero_|fill_|full|constant_pad|sort|argsort|topk|cumsum|slice|split)"),
    (ELEMENTWISE, r"^aten::"),
)

CASTING_OPERATORS = re.compile(r"^mxfp8_titan::")
"""Operators whose inner work, products aside, is quantization: the emulation."""


def kind_of(name: str, patterns: tuple[tuple[str, str], ...] = GPU_KERNELS) -> str:
    """The kind of the kernel or operator called `name`; OTHER for an unknown one."""
    return next((kind for kind, pattern in patterns if re.search(pattern, name, re.IGNORECASE)), OTHER)
