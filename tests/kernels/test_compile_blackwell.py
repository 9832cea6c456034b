"""Every kernel of the mxfp8_cublas recipes compiles for sm100a and sm103a without a GPU, within bounds, printed by -rP.

The bounds hold for Triton 3.6. Stack above 0 is spilled registers.
"""

import re
import subprocess

import pytest
import triton

from mxfp8_titan.format import BLOCKED, RCEIL
from mxfp8_titan.kernels import dot_scaled_gemm, swiglu, zero_groups, zero_rows
from tests.kernels.test_compile import CUOBJDUMP, compile_kernel, layouts_of_triton_3_6, quantize_case

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="runs without TRITON_INTERPRET: it compiles")

SHARED_MEMORY = 227 * 1024
"""Bytes that one program may have on sm100 and sm103."""

GROUPS = 8


def swiglu_case(backward, along_k, along_t):
    return swiglu.swiglu_kernel, {
        "num_warps": swiglu.NUM_WARPS, "ROUNDING": RCEIL, "BACKWARD": backward, "ALONG_K": along_k, "ALONG_T": along_t,
        "BLOCKED": True, "GROUPS": GROUPS, "TILE_K": swiglu.TILE_K, "VEC": swiglu.VEC, "BAND": swiglu.BAND,
    }  # fmt: skip


def gemm_case(name, groups, out="*bf16", **constants):
    kernel = {"rows": dot_scaled_gemm.gemm_of_rows_kernel, "over_t": dot_scaled_gemm.gemm_over_t_kernel}[name]
    rows_of_b = dot_scaled_gemm.TILE_N if name == "rows" else 128
    types = {"out_ptr": out}
    for pair in ("", "2"):
        for operand, rows in (("a", 128), ("b", rows_of_b)):
            types[f"{operand}{pair}_desc"] = f"tensordesc<fp8e4nv[{rows}, 128]>"
            types[f"{operand}{pair}_scale_desc"] = f"tensordesc<u8[{rows // 128}, 1, 2, 256]>"
    return kernel, {
        "num_warps": dot_scaled_gemm.NUM_WARPS[name], "types": types, "GROUPS": groups,
        "STAGES": dot_scaled_gemm.STAGES[name], **constants,
    }  # fmt: skip


def rows_case(groups, pairs=1, **options):
    return gemm_case("rows", groups, PAIRS=pairs, TILE_N=dot_scaled_gemm.TILE_N, **options)


CASES = {
    # name: (kernel and its constants, most registers, most bytes of stack)
    "x, dy": (quantize_case(True, True, BLOCKED, GROUPS), 168, 128),
    "x, dy, dense": (quantize_case(True, True, BLOCKED), 168, 96),
    "w": (quantize_case(True, False, BLOCKED), 64, 0),
    "x, no dw": (quantize_case(True, False, BLOCKED, GROUPS), 64, 0),
    "w for dx": (quantize_case(False, True, BLOCKED), 104, 0),
    "h": (swiglu_case(False, True, False), 80, 0),
    "h for dw": (swiglu_case(False, False, True), 80, 0),
    "dh13": (swiglu_case(True, True, True), 168, 0),
    "rows past the last group": (
        (zero_rows.zero_rows_kernel, {"num_warps": zero_rows.NUM_WARPS, "BLOCK": zero_rows.BLOCK,
         "types": {"out_ptr": "*bf16"}}), 40, 0,
    ),
    "empty groups": (
        (zero_groups.zero_groups_kernel, {"num_warps": zero_groups.NUM_WARPS, "BLOCK": zero_groups.BLOCK,
         "types": {"out_ptr": "*bf16"}}), 40, 0,
    ),
    "y, dx": (rows_case(GROUPS), 200, 0),
    "y, dx, dense": (rows_case(0), 200, 0),
    "y, dx, 256 experts": (rows_case(256), 200, 0),
    "dx of w1 and w3": (rows_case(GROUPS, 2), 200, 0),
    "y, dx, fp32": (rows_case(GROUPS, out="*fp32"), 255, 64),
    "dw": (gemm_case("over_t", GROUPS), 224, 0),
    "dw, dense": (gemm_case("over_t", 0), 224, 0),
    "dw, 256 experts": (gemm_case("over_t", 256), 224, 0),
}  # fmt: skip
GEMMS = [name for name in CASES if name.startswith(("y,", "dx", "dw"))]
QUANTIZERS = [name for name in CASES if name.startswith(("x", "w", "h", "dh"))]


def usage(compiled, tmp_path):
    """(registers, bytes of stack)"""
    path = tmp_path / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    out = subprocess.run([CUOBJDUMP, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, re.search(r"REG:(\d+) STACK:(\d+)", out).groups()))


@layouts_of_triton_3_6
@pytest.mark.parametrize("capability", [100, 103])
@pytest.mark.parametrize("name", CASES)
def test_compiles_within_its_registers_stack_and_shared_memory(name, capability, tmp_path):
    (kernel, constants), most_registers, most_stack = CASES[name]
    compiled = compile_kernel(kernel, capability, **constants)
    assert f".target sm_{capability}a" in compiled.asm["ptx"]
    registers, stack = usage(compiled, tmp_path)
    print(f"sm{capability}a {name}: {registers} registers, {stack} B stack, {compiled.metadata.shared} B shared")
    assert registers <= most_registers
    assert stack <= most_stack
    assert compiled.metadata.shared <= SHARED_MEMORY // (2 if name.startswith("dw") else 1)


@layouts_of_triton_3_6
@pytest.mark.parametrize("capability", [100, 103])
@pytest.mark.parametrize("name", GEMMS)
def test_gemms_use_the_block_scaled_tensor_cores_and_the_copy_engine(name, capability):
    (kernel, constants), _, _ = CASES[name]
    ptx = compile_kernel(kernel, capability, **constants).asm["ptx"]
    assert re.search(r"tcgen05\.mma\.cta_group::1\.kind::mxf8f6f4\.block_scale", ptx)
    assert "cp.async.bulk.tensor" in ptx
    # Scales go from shared to tensor memory, which is how the tensor core reads them: no register holds one.
    assert "tcgen05.cp" in ptx
    stores = re.findall(r"tcgen05\.st\.sync\.aligned\.\S+", ptx)
    assert all(".x64." in store or ".x128." in store for store in stores), "something else than a sum is stored"


@pytest.mark.parametrize("capability", [100, 103])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizers_round_elements_by_the_hardware_conversion(name, capability):
    """Scales are made by integer arithmetic, so that there is no conversion to E8M0 to check."""
    (kernel, constants), _, _ = CASES[name]
    ptx = compile_kernel(kernel, capability, **constants).asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "ue8m0x2" not in ptx
