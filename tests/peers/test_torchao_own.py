"""torchao 0.18.0's own tests, run against this project's functions; docs/cases.md says how they ended.

On a GPU the functions are this project's kernels, on a CPU their references, and cases that take a CPU minutes are left
out. With `folder` the unzipped wheel of torchao==0.18.0: TORCHAO_TESTS=folder python -m pytest tests/peers
"""

import functools
import math

import pytest

from mxfp8_titan.format import RCEIL
from tests.peers import stand_ins as ours
from tests.peers import torchao_adapter as theirs

if theirs.missing():
    pytest.skip(theirs.missing(), allow_module_level=True)

LARGEST = 2**28
"""Elements of the largest tensor of a case on a CPU."""


def at_most(largest: int, *dims: str):
    """Takes the cases whose tensor with these dims has no more elements; on a GPU all."""
    return lambda **case: ours.ON_GPU or math.prod(case[dim] for dim in dims) <= largest


def powers_of_two(**case) -> bool:
    small = math.prod(case.get(dim, 1) for dim in "emnk") <= LARGEST
    return case["round_scales_to_power_of_2"] and (ours.ON_GPU or small)


def emulated(**case) -> bool:
    return case["kernel_preference"].value == "emulated" and not case.get("use_compile")


def emulated_recipe(**case) -> bool:
    return case["recipe"].value == "mxfp8_emulated_rceil"


def emulated_training(**case) -> bool:
    """kernel_preference, which the test does not read, takes one value of two."""
    return case["recipe_config"]["recipe"].value == "mxfp8_emulated_rceil" and emulated(**case) and not case["compile"]


def has_recipe(fits, layers: ours.Layers):
    """`fits`, where the layers have a recipe of the case's rounding."""

    def fits_layers(**case) -> bool:
        rounding = case["scale_mode"].value if "scale_mode" in case else RCEIL
        return fits(**case) and rounding in layers.recipes

    return fits_layers


def anything(**case) -> bool:
    return True


KERNELS = "prototype/moe_training/test_kernels.py"
GROUPED = "prototype/moe_training/test_mxfp8_grouped_mm.py"
LINEAR = "prototype/moe_training/test_mxfp8_linear.py"
TENSOR = "prototype/moe_training/test_tensor.py"
TRAINING = "prototype/moe_training/test_training.py"

REPLACED = {
    KERNELS: {
        "triton_mx_block_rearrange_2d_M_groups": ours.rearrange_rows_of_groups,
        "mx_block_rearrange_2d_M_groups_cuda": ours.rearrange_rows_of_groups,
        "triton_mx_block_rearrange_2d_K_groups": ours.rearrange_columns_of_groups,
        "triton_mx_block_rearrange_per_group_3d": ours.swizzle_per_expert,
        "triton_mx_block_rearrange": ours.their_blocked,
        "mxfp8_quantize_2d_1x32_cutedsl": ours.quantize_rows_blocked,
        "mxfp8_quantize_2d_32x1_cutedsl": ours.quantize_columns,
        "mxfp8_quantize_cuda_3d": ours.quantize_weights,
        "mxfp8_quantize_2d_1x32_flydsl": ours.quantize_rows,
        "mxfp8_quantize_2d_32x1_flydsl": ours.quantize_columns,
        "mxfp8_quantize_3d_flydsl": ours.quantize_weights,
        "triton_fp8_rowwise_2d_scale_and_cast": ours.scale_and_cast_rows,
        "triton_fp8_colwise_3d_scale_and_cast": ours.scale_and_cast_columns,
        "triton_fp8_rowwise_3d_transpose_rhs": ours.scale_and_cast_weights_along_n,
        "triton_fp8_rowwise_3d_transpose_rhs_fused_reduction": ours.scale_and_cast_weights_along_n,
        "triton_fp8_per_group_rowwise_scales": ours.scale_and_cast_rows_of_groups,
        "triton_fp8_per_group_colwise_scales": ours.scale_and_cast_columns_of_groups,
        "_mxfp8_cutedsl_kernels_available": True,
    },
    GROUPED: {
        "triton_to_mxfp8_dim0": ours.quantize_rows_dim0,
        "mxfp8_quantize_cuda_3d": ours.quantize_weights,
        "_to_mxfp8_per_group_rowwise": ours.quantize_rows_of_groups,
        "_to_mxfp8_per_group_colwise": ours.quantize_columns_of_groups,
        "_emulated_mxfp8_scaled_grouped_mm_2d_3d": ours.rows_times_experts,
        "_emulated_mxfp8_scaled_grouped_mm_2d_2d": ours.products_over_tokens,
        "_to_mxfp8_then_scaled_grouped_mm": ours.grouped_linear,
    },
    LINEAR: {"MXFP8Linear": ours.linear},
    TENSOR: {"MXFP8TrainingWeightWrapperTensor": ours.Weight},
    TRAINING: {"quantize_": ours.convert},
}
"""Test file of torchao -> name in it -> this project's function."""

RUN = {
    KERNELS: {
        "test_triton_mx_block_rearrange_2d_M_groups": at_most(LARGEST, "m", "k"),
        "test_cuda_mx_block_rearrange_2d_M_groups": at_most(LARGEST, "m", "k"),
        "test_triton_mx_block_rearrange_2d_K_groups": at_most(LARGEST, "m", "total_k"),
        "test_mxfp8_per_group_blocked_scales_3d": anything,
        "test_cuda_mx_3d_cutedsl_numerics": at_most(2**23, "E", "N", "K"),
        "test_cuda_mx_dim0_2d_numerics": anything,
        "test_cuda_mx_dim1_2d_numerics_32x1": anything,
        "test_cutedsl_kernels_work_with_valid_128_multiple_groups": anything,
        "test_flydsl_mx_dim1_2d_numerics": anything,
        "test_flydsl_mx_dim0_2d_numerics": anything,
        "test_flydsl_mx_dim1_3d_numerics": anything,
        "test_triton_fp8_rowwise_2d_scale_and_cast": powers_of_two,
        "test_triton_fp8_colwise_3d_scale_and_cast": powers_of_two,
        "test_fp8_rowwise_3d_transpose_rhs_atomic": powers_of_two,
        "test_fp8_rowwise_3d_transpose_rhs_reduction": powers_of_two,
        "test_row_major_with_jagged_rowwise_scales": powers_of_two,
        "test_row_major_with_jagged_rowwise_scales_transpose_method": powers_of_two,
        "test_column_major_with_jagged_colwise_scales": powers_of_two,
        "test_flydsl_2d_32x1_rejects_misaligned_M": anything,
        "test_amd_mx_3d_flydsl_numerics": anything,
    },
    GROUPED: {
        "test_emulate_mxfp8_grouped_gemm_2d_3d": at_most(2**26, "num_experts", "N", "K"),
        "test_emulate_mxfp8_grouped_gemm_2d_2d": anything,
        "test_mxfp8_grouped_gemm_with_dq_fwd_bwd": emulated,
        "test_mxfp8_grouped_gemm_bias_none_unchanged": anything,
    },
    LINEAR: {
        "test_mxfp8_linear_fwd_bwd_sqnr": emulated,
        "test_mxfp8_linear_noncontiguous_grad_output": emulated,
        "test_mxfp8_linear_3d_input": anything,
    },
    TENSOR: {
        "test_mxfp8_training_tensor_ops_fwd_bwd": emulated_recipe,
        "test_mxfp8_grouped_mm_with_bias": lambda **case: emulated_recipe(**case) and not case["use_bias"],
    },
    TRAINING: {"test_moe_training": emulated_training},
}
"""Test of torchao -> which of its cases."""

LAYERS = {
    "test_mxfp8_grouped_gemm_with_dq_fwd_bwd",
    "test_mxfp8_grouped_gemm_bias_none_unchanged",
    *RUN[LINEAR],
    *RUN[TENSOR],
    *RUN[TRAINING],
}
"""Tests that run once for each of ours.ALL_LAYERS."""

GPU_ONLY = {
    "test_fp8_rowwise_3d_transpose_rhs_atomic": "a tensor of 839 million elements, several copies",
    "test_fp8_rowwise_3d_transpose_rhs_reduction": "a tensor of 839 million elements, several copies",
    "test_moe_training": "two models of a billion parameters",
}
"""Test of torchao -> why it is not run on a CPU."""

SMALLER = {"test_mxfp8_grouped_gemm_with_dq_fwd_bwd": {"M,K,N": [(1024, 640, 1024), (1664, 896, 256)]}}
"""Test of torchao -> other values for its parameters on a CPU: its own take it minutes a case."""

DIFFERENCES = {
    "test_flydsl_2d_32x1_rejects_misaligned_M": theirs.Difference(
        anything, pytest.fail.Exception, "a number of rows that 32 does not divide is padded here, not refused"
    ),
    "test_cuda_mx_3d_cutedsl_numerics": theirs.Difference(
        lambda **case: not ours.KERNELS and case["variant"] == "32x32_t" and case["E"] == 1,
        AssertionError,
        "same bytes in the same order; the reference's dim of one expert has another stride, the kernel's has not",
    ),
}
"""Test of torchao -> which of its cases fail, and why."""

NOT_RUN = {
    KERNELS: {
        "test_cuda_fused_pad_token_groups": "torchtitan pads groups, this project has no such kernel",
        "test_cuda_fused_unpad_token_groups": "torchtitan pads groups, this project has no such kernel",
        "test_cutedsl_1x32_group_validation_error": "starts a script for sm100, and passes wherever that fails",
        "test_cutedsl_32x1_group_validation_error": "starts a script for sm100, and passes wherever that fails",
    },
    GROUPED: {
        "test_mxfp8_grouped_gemm_2d_3d": "torch._scaled_grouped_mm multiplies MXFP8 on sm100 only",
        "test_mxfp8_grouped_gemm_from_qdata_and_scales_matches_dynamic": "inputs are never quantized beforehand here",
        "test_mxfp8_grouped_gemm_from_qdata_and_scales_forward": "inputs are never quantized beforehand here",
        "test_mxfp8_grouped_gemm_mxtensor_requires_wgrad_with_hp": "inputs are never quantized beforehand here",
        "test_mxfp8_grouped_gemm_bias_forward": "experts with biases are refused here",
        "test_mxfp8_grouped_gemm_bias_backward": "experts with biases are refused here",
    },
    LINEAR: {},
    TENSOR: {
        "test_mxfp8_training_tensor_ops_preserve_subclass": "modules are converted here, there is no tensor subclass",
        "test_float8_training_tensor_ops_fwd_bwd": "FP8 with one scale a tensor or a row is no recipe here",
    },
    TRAINING: {},
}
"""Test of torchao -> why it is not run."""

for file, replaced in REPLACED.items():
    module = theirs.load(file, replaced)
    named = {*RUN[file], *NOT_RUN[file]}
    found = set(theirs.tests(module))
    assert named == found, f"{file}: {sorted(named ^ found)}"
    for name, fits in RUN[file].items():
        if name in GPU_ONLY and not ours.ON_GPU:
            continue
        smaller = {} if ours.ON_GPU else SMALLER.get(name, {})
        for layers in ours.ALL_LAYERS if name in LAYERS else [ours.EMULATED]:
            called = name if layers is ours.EMULATED else f"{name}_{layers.name}"
            globals()[called] = theirs.adapted(
                getattr(module, name),
                has_recipe(fits, layers),
                smaller,
                DIFFERENCES.get(name),
                functools.partial(ours.use, layers),
            )
