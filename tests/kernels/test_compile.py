"""Every kernel compiles for Hopper and Blackwell, without a GPU, within its budget of registers and without spills.

The bounds are what the layouts in kernels/tile.py promise. A Triton that assigns dims to threads another way would
still give right answers, but need more registers or shuffle along T, and fail here.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from mxfp8_titan.format import BLOCK_SIZE, BLOCKED, GROUP_TILE, PLAIN, RCEIL
from mxfp8_titan.kernels import (
    aligned_gemm,
    alignment_counts,
    column_maxima,
    quantize,
    quantize_32x32,
    quantize_aligned,
    quantize_aligned_t,
    scale_swizzle,
    scale_unswizzle,
    swiglu,
    swiglu_aligned,
    zero_rows,
)

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="runs without TRITON_INTERPRET: it compiles")

# Triton 3.9 assigns the dims of these tiles to threads another way: right answers, but up to 792 bytes of spills.
layouts_of_triton_3_6 = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."),
    reason=f"runs with Triton 3.6, which the bounds hold for; this is {triton.__version__}",
)

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
POINTERS = {
    "x_ptr": "*bf16",
    "w_ptr": "*bf16",
    "h1_ptr": "*bf16",
    "h13_ptr": "*bf16",
    "h3_ptr": "*bf16",
    "dh_ptr": "*bf16",
    "group_ends_ptr": "*i32",
    "amax_ptr": "*fp32",
    "row_scale_ptr": "*fp32",
    "partial_ptr": "*i32",
    "scale_ptr": "*fp32",
    "out_ptr": "*u8",
}
DIVISIBLE = {"T", "T_OUT", "N", "K", "H", "R", "C", "columns", "first_column", "out_words"}
"""Sizes that are multiples of 16 in training, as strides are; Triton compiles for that."""


def argument_type(name):
    if not name.endswith("_ptr"):
        return "i32"
    return POINTERS.get(name, "*u8" if "scale" in name else "*fp8e4nv")


def compile_kernel(kernel, capability, num_warps, maxnreg=None, types=None, **constants):
    constants |= {name: 1 for name in kernel.arg_names if name in ("stride_xk", "stride_wk", "stride_hk")}
    if constants.pop("ROW_MAJOR_SCALES", False):
        constants |= {"stride_c": 1, "ROW_MAJOR": True}
    types = types or {}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, argument_type(name))
        divisible = name.endswith("_ptr") or name.startswith("stride") or name in DIVISIBLE
        if name not in constants and divisible:
            attributes[(i,)] = [["tt.divisibility", 16]]
    indexed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=indexed, attrs=attributes)
    options = {"num_warps": num_warps} | ({} if maxnreg is None else {"maxnreg": maxnreg})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(compiled):
    """(registers, bytes of stack, SASS) of a compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        usage, sass = (
            subprocess.run([CUOBJDUMP, flag, path], capture_output=True, text=True, check=True).stdout
            for flag in ("--dump-resource-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    return int(found[1]), int(found[2]), sass


def quantize_case(along_k, along_t, layout, groups=0):
    config = quantize._config(along_k, along_t, layout)
    return quantize.quantize_kernel, {
        "num_warps": config.num_warps,
        "maxnreg": config.maxnreg,
        "ROUNDING": RCEIL,
        "ALONG_K": along_k,
        "ALONG_T": along_t,
        "BLOCKED": layout == BLOCKED,
        "GROUPS": groups,
        "WORDS": True,
        "TILE_K": config.tile_k,
        "VEC": config.vec,
        "BAND": config.band,
        "HOLD": config.hold,
    }


def aligned_case(features, with_amax, groups=0):
    head, tail = quantize_aligned.row_parts(features)
    x = torch.empty(32768, features, dtype=torch.bfloat16, device="meta")
    per_warp, stages = quantize_aligned.ELEMENTS_PER_WARP, 1
    if with_amax:
        per_warp, stages, _ = quantize_aligned.config_with_amax(x)
    return quantize_aligned.aligned_along_k_kernel, {
        "num_warps": head // per_warp,
        "ROUNDING": RCEIL,
        "WITH_AMAX": with_amax,
        "GROUPS": groups,
        "HEAD": head,
        "TAIL": tail,
        "STAGES": stages,
    }


def requantize_case(groups):
    return quantize_aligned_t.aligned_along_t_kernel, {
        "num_warps": quantize_aligned_t.NUM_WARPS,
        "types": {"x_ptr": "*fp8e4nv"},
        "ROUNDING": RCEIL,
        "FROM_FP8": True,
        "WORDS": False,
        "WHOLE": True,
        "GROUPS": groups,
        "TILE_K": quantize_aligned_t.TILE_K,
        "VEC": quantize_aligned_t.VEC,
        "BAND": quantize_aligned_t.BAND,
    }


def square_case(layout):
    return quantize_32x32.quantize_32x32_kernel, {
        "num_warps": quantize_32x32.NUM_WARPS,
        "ROUNDING": RCEIL,
        "BLOCKED": layout == BLOCKED,
        "WORDS": True,
        "VEC": quantize_32x32.VEC,
        "BAND": quantize_32x32.BAND,
    }


def swizzle_case(case, groups):
    return scale_swizzle.swizzle_kernel, {
        "num_warps": scale_swizzle.NUM_WARPS,
        "types": {"scale_ptr": "*u8"},
        "CASE": case,
        "GROUPS": groups,
        "ROW_MAJOR_SCALES": True,
        "WORDS": True,
        "TILES": scale_swizzle.TILES,
    }


def swiglu_case(backward, along_t):
    return swiglu.swiglu_kernel, {
        "num_warps": swiglu.NUM_WARPS,
        "ROUNDING": RCEIL,
        "BACKWARD": backward,
        "ALONG_K": True,
        "ALONG_T": along_t,
        "BLOCKED": False,
        "GROUPS": 0,
        "TILE_K": swiglu.TILE_K,
        "VEC": swiglu.VEC,
        "BAND": swiglu.BAND,
    }


def swiglu_aligned_case(hidden, backward, groups=8):
    kernel = swiglu_aligned.swiglu_aligned_backward_kernel if backward else swiglu_aligned.swiglu_aligned_kernel
    with_tail = quantize_aligned.row_parts(hidden)[1] > 0
    config = swiglu_aligned.BACKWARD_WITH_TAIL if with_tail else swiglu_aligned.BACKWARD
    config = config if backward else swiglu_aligned.FORWARD
    row_bytes = hidden * (6 if backward else 4)
    config = swiglu_aligned.config_for(-1, 32768, hidden, 8, row_bytes, config)
    head, tail, stages = config.constants
    return kernel, {
        "num_warps": config.warps,
        "maxnreg": config.registers,
        "ROUNDING": RCEIL,
        "GROUPS": groups,
        "HEAD": head,
        "TAIL": tail,
        "STAGES": stages,
    }


def along_t_case(kernel, groups, **constants):
    return kernel, {
        "num_warps": quantize_aligned_t.NUM_WARPS,
        "GROUPS": groups,
        "TILE_K": quantize_aligned_t.TILE_K,
        "VEC": quantize_aligned_t.VEC,
    } | constants


def merge_case(groups):
    return column_maxima.merge_maxima_kernel, {
        "num_warps": column_maxima.NUM_WARPS,
        "GROUPS": groups,
        "ROWS": column_maxima.ROWS[1],
        "COLUMNS": column_maxima.COLUMNS[1],
    }


def zero_rows_case():
    return zero_rows.zero_rows_kernel, {
        "num_warps": zero_rows.NUM_WARPS,
        "types": {"out_ptr": "*bf16"},
        "BLOCK": zero_rows.BLOCK,
    }


def alignment_counts_case():
    return alignment_counts.alignment_counts_kernel, {
        "num_warps": alignment_counts.NUM_WARPS,
        "types": {"phase_ptr": "*i64", "out_ptr": "*fp32"},
        "ROUNDING": RCEIL,
        "GROUPS": True,
        "BLOCKS": alignment_counts.BLOCKS,
    }


def padded_ends_case():
    return quantize_aligned_t.padded_group_ends_kernel, {
        "num_warps": quantize_aligned_t.NUM_WARPS,
        "types": {"out_ptr": "*i32"},
        "TILE": 128,
        "GROUPS": 16,
    }


def unswizzle_case(case, groups):
    return scale_unswizzle.unswizzle_kernel, {
        "num_warps": 4,
        "types": {"blocked_ptr": "*u8"},
        "CASE": case,
        "GROUPS": groups,
        "BLOCK_C": scale_unswizzle.BLOCK_C,
    }


CASES = {
    # name: (kernel and its constants, most registers, most bytes of stack)
    "along_k": (quantize_case(True, False, PLAIN), 64, 0),
    "along_k blocked groups": (quantize_case(True, False, BLOCKED, 8), 64, 0),
    "along_t": (quantize_case(False, True, PLAIN), 104, 0),
    "along_t blocked groups": (quantize_case(False, True, BLOCKED, 8), 168, 0),
    "both": (quantize_case(True, True, PLAIN), 128, 0),
    "both blocked": (quantize_case(True, True, BLOCKED), 168, 64),
    "aligned 5120": (aligned_case(5120, False), 64, 0),
    "aligned 8192": (aligned_case(8192, False), 64, 0),
    "aligned 5120 with maxima": (aligned_case(5120, True, 8), 168, 0),
    "aligned 8192 with maxima": (aligned_case(8192, True, 8), 128, 0),
    "requantize": (requantize_case(8), 96, 0),
    "aligned along t": (
        along_t_case(
            quantize_aligned_t.aligned_along_t_kernel,
            8,
            ROUNDING=RCEIL,
            FROM_FP8=False,
            WORDS=True,
            WHOLE=True,
            BAND=quantize_aligned_t.BAND,
        ),
        128,
        0,
    ),
    "column maxima": (along_t_case(quantize_aligned_t.column_amax_kernel, 8), 128, 0),
    "32x32": (square_case(PLAIN), 128, 0),
    "32x32 blocked": (square_case(BLOCKED), 128, 0),
    "swizzle k groups": (swizzle_case(2, 16), 72, 0),
    "swizzle t groups": (swizzle_case(1, 8), 96, 0),
    "swizzle": (swizzle_case(0, 0), 96, 0),
    "unswizzle": (unswizzle_case(0, 0), 128, 0),
    "unswizzle t groups": (unswizzle_case(1, 8), 128, 0),
    "unswizzle k groups": (unswizzle_case(2, 8), 255, 0),
    "swiglu": (swiglu_case(False, True), 80, 0),
    "swiglu backward": (swiglu_case(True, False), 96, 0),
    "swiglu aligned 5120": (swiglu_aligned_case(5120, False), 168, 16),
    "swiglu aligned 8192": (swiglu_aligned_case(8192, False), 128, 0),
    "swiglu aligned 8192 backward": (swiglu_aligned_case(8192, True), 128, 0),
    "swiglu aligned 5120 backward": (swiglu_aligned_case(5120, True), 216, 0),
    "swiglu aligned 32768": (swiglu_aligned_case(32768, False), 64, 256),
    "swiglu aligned 32768 backward": (swiglu_aligned_case(32768, True), 64, 1280),
    "merge maxima": (merge_case(16), 64, 0),
    "zero rows": (zero_rows_case(), 40, 0),
    "padded ends": (padded_ends_case(), 40, 0),
    "alignment counts": (alignment_counts_case(), 64, 0),
}
"""Stack above 0 is spilled registers, kept where fewer programs at once measured slower."""


@layouts_of_triton_3_6
@pytest.mark.parametrize("name", CASES)
def test_compiles_for_hopper_within_its_registers(name):
    (kernel, constants), most_registers, most_stack = CASES[name]
    registers, stack, _ = resources(compile_kernel(kernel, 90, **constants))
    assert registers <= most_registers
    assert stack <= most_stack


@pytest.mark.parametrize("name", CASES)
def test_compiles_for_blackwell(name):
    (kernel, constants), _, _ = CASES[name]
    assert "cubin" in compile_kernel(kernel, 100, **constants).asm


@layouts_of_triton_3_6
@pytest.mark.parametrize("layout", [PLAIN, BLOCKED])
def test_the_maximum_along_t_never_leaves_a_thread(layout):
    kernel, constants = quantize_case(False, True, layout)
    sass = resources(compile_kernel(kernel, 90, **constants))[2]
    assert "SHFL" not in sass
    assert "REDUX" not in sass
    assert "LDG.E.64" in sass
    assert "STG.E.128" in sass


def compile_aligned_gemm(over_t, out_dtype):
    """Gluon kernels have layouts in their signature, and only sm_90 has their instructions."""
    boxes = {
        "a_desc": ("fp8e4nv", [aligned_gemm.TILE_M, GROUP_TILE], aligned_gemm.OPERAND_LAYOUT),
        "b_desc": ("fp8e4nv", [aligned_gemm.TILE_N, GROUP_TILE], aligned_gemm.OPERAND_LAYOUT),
        "c_desc": (
            {torch.bfloat16: "bf16", torch.float32: "fp32"}[out_dtype],
            [BLOCK_SIZE, aligned_gemm.BOX_BYTES // out_dtype.itemsize],
            aligned_gemm.OUT_LAYOUTS[out_dtype],
        ),
    }
    types = {name: f"tensordesc<{dtype}{box},{layout!r}>" for name, (dtype, box, layout) in boxes.items()}
    types |= {"a_scale_ptr": "*fp32", "b_scale_ptr": "*fp32", "group_ends_ptr": "*i32"}
    types["c_ptr"] = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[out_dtype]
    constants = {
        "OVER_T": over_t,
        "TILE_M": aligned_gemm.TILE_M,
        "TILE_N": aligned_gemm.TILE_N,
        "STAGES": aligned_gemm.STAGES[out_dtype],
        "BAND": aligned_gemm.BAND,
        "REGISTERS": aligned_gemm.REGISTERS,
        "num_warps": aligned_gemm.NUM_WARPS,
    }
    names = aligned_gemm.aligned_gemm_kernel.arg_names
    source = GluonASTSource(
        fn=aligned_gemm.aligned_gemm_kernel,
        signature={name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={},
    )
    options = {"num_warps": aligned_gemm.NUM_WARPS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@layouts_of_triton_3_6
@pytest.mark.parametrize("over_t", [False, True])
@pytest.mark.parametrize("out_dtype", aligned_gemm.STAGES)
def test_the_fp8_gemm_fits_in_registers_and_shared_memory(over_t, out_dtype):
    compiled = compile_aligned_gemm(over_t, out_dtype)
    registers, stack, sass = resources(compiled)
    # What a kernel of 384 threads starts with; then warps hand each other theirs.
    assert registers <= 168
    assert stack == 0
    assert compiled.metadata.shared <= 227 * 1024
    assert re.search(rf"USETMAXREG.TRY_ALLOC.CTAPOOL UP\d, {aligned_gemm.REGISTERS:#x}", sass)
    # Four steps of 32 along K, or two in a last half block; two halves of a tile, two groups of warps.
    assert sass.count("QGMMA.64x128x32.F32.E4M3.E4M3") == (4 + 2) * 2 * 2
