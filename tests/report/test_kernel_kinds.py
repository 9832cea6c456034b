import ast
from pathlib import Path

import pytest

import mxfp8_titan
from mxfp8_titan.report import draw
from mxfp8_titan.report import kernel_kinds as kinds

KERNELS = Path(mxfp8_titan.__file__).parent / "kernels"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN", kinds.GEMM_DENSE),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", kinds.GEMM_DENSE),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::cublasSplitKParams)", kinds.GEMM_DENSE),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>>>",
         kinds.GEMM_DENSE),
        ("triton_tem_fused_mm_3", kinds.GEMM_DENSE),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<"
         "cutlass::gemm::GroupProblemShape<cute::tuple<int, int, int>>>>>", kinds.GEMM_GROUPED),
        ("void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t>(int*)", kinds.GEMM_GROUPED),
        ("aligned_gemm_kernel", kinds.GEMM_OWN),
        ("aligned_along_k_kernel", kinds.QUANTIZATION),
        ("column_amax_kernel", kinds.QUANTIZATION),
        ("swiglu_kernel", kinds.QUANTIZATION),
        ("triton_red_fused__to_copy_abs_amax_clamp_2", kinds.QUANTIZATION),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t>>", kinds.ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3", kinds.ATTENTION),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", kinds.ATTENTION),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", kinds.COMMUNICATION),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>",
         kinds.OPTIMIZER),
        ("triton_poi_fused_silu_mul_1", kinds.ELEMENTWISE),
        ("triton_poi_fused__scaled_dot_product_flash_attention_transpose_4", kinds.ELEMENTWISE),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", kinds.ELEMENTWISE),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", kinds.ELEMENTWISE),
        ("Memcpy DtoD (Device -> Device)", kinds.COPIES),
        ("Memset (Device)", kinds.COPIES),
        ("void at::native::(anonymous namespace)::chunk_cat_cuda_kernel<float>", kinds.COPIES),
        ("void at::native::vectorized_gather_kernel<16, long>(char*)", kinds.COPIES),
        ("gather_rows_kernel", kinds.COPIES),
        ("something_new", kinds.OTHER),
    ],
)  # fmt: skip
def test_kernels_are_known_by_name(name, kind):
    assert kinds.kind_of(name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", kinds.GEMM_DENSE),
        ("aten::_grouped_mm", kinds.GEMM_GROUPED),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", kinds.ATTENTION),
        ("mxfp8_titan::reference_y", kinds.QUANTIZATION),
        ("c10d::_allgather_base_", kinds.COMMUNICATION),
        ("aten::_fused_adamw_", kinds.OPTIMIZER),
        ("aten::copy_", kinds.COPIES),
        ("aten::mul", kinds.ELEMENTWISE),
        ("LinearFunctionBackward", kinds.OTHER),
    ],
)
def test_operators_are_known_by_name(name, kind):
    assert kinds.kind_of(name, kinds.CPU_OPERATORS) == kind


def test_every_kernel_of_this_project_has_a_kind():
    named = [
        node.name
        for path in KERNELS.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    ]
    assert "quantize_kernel" in named
    assert [name for name in named if kinds.kind_of(name) in (kinds.OTHER, kinds.GEMM_DENSE)] == []


def test_every_kind_has_a_title_and_a_colour():
    of_patterns = {kind for kind, _ in (*kinds.GPU_KERNELS, *kinds.CPU_OPERATORS)} | {kinds.OTHER}
    assert of_patterns == set(kinds.TITLES) == set(draw.COLOURS)
