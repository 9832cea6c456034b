"""The SwiGLU product and its gradients, quantized without ever being stored unquantized.

Reference: mxfp8_titan.reference.swiglu, then reference.quantize. Both compute in fp32, this kernel with the hardware's
exponential, which is right to about 2 ulp: an element that lies that close to a rounding boundary may come out one
step off, and a block whose amax does, one scale up or down. h1, h3, dh are (T, K), K being the hidden features that
the next GEMM contracts.
"""

import triton
import triton.language as tl
from torch import Tensor

from mxfp8_titan.format import BLOCK_SIZE, BLOCKED, GROUP_TILE, PLAIN, round_up
from mxfp8_titan.kernels.e4m3 import CAST_BY_HAND, magnitude_bits, to_fp32
from mxfp8_titan.kernels.groups import place_tile
from mxfp8_titan.kernels.launch import (
    ceil_div,
    check_blocks,
    check_choices,
    check_groups,
    check_source,
    launch,
    register_op,
)
from mxfp8_titan.kernels.quantize import allocate_along_k, allocate_along_t
from mxfp8_titan.kernels.tile import (
    TILE_T,
    load_along_k,
    offsets_along_t,
    store_along_k,
    store_along_t,
    tile_of,
)

TILE_K, VEC, BAND, NUM_WARPS = 64, 2, 8, 8
"""Features per tile, features per thread along T, tiles along T that are worked on together, warps."""


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) with the hardware's power of two and reciprocal, 1 ulp each.

    In the order of infinities: exp may overflow, and the reciprocal of Inf is 0. Written in PTX because Triton's own
    exp and division guard against subnormals, which takes three times as many instructions.
    """
    if CAST_BY_HAND:
        return 1.0 / (1.0 + tl.exp(-x))
    else:  # noqa: RET505 - one branch is compiled
        e = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [1.0 + e], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _load(ptr, at, stride_t, stride_k, rows, tile_k, K, ALONG_T: tl.constexpr, TILE_K: tl.constexpr, VEC: tl.constexpr):
    """One tile of an input in fp32, in the shape of either direction; `at` is the offset of its first row."""
    if ALONG_T:
        t, k = offsets_along_t(tile_k, TILE_K, VEC)
        x_ptrs = ptr + at + t.to(tl.int64) * stride_t + k.to(tl.int64) * stride_k
        return to_fp32(tl.load(x_ptrs, mask=(t < rows) & (k < K), other=0.0))
    else:  # noqa: RET505 - one branch is compiled
        return load_along_k(ptr + at, stride_t, stride_k, rows, tile_k, K, TILE_K)


@triton.jit
def swiglu_kernel(
    dh_ptr, h1_ptr, h3_ptr,
    a_along_k_ptr, a_scale_k_ptr, a_along_t_ptr, a_scale_t_ptr,
    b_along_k_ptr, b_scale_k_ptr, b_along_t_ptr, b_scale_t_ptr,
    group_ends_ptr, T, T_OUT, K, stride_ht, stride_hk, tiles_t, tiles_k, num_groups, scale_k_bytes, scale_t_bytes,
    ROUNDING: tl.constexpr, BACKWARD: tl.constexpr, ALONG_K: tl.constexpr, ALONG_T: tl.constexpr,
    BLOCKED: tl.constexpr, GROUPS: tl.constexpr, TILE_K: tl.constexpr, VEC: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """One program works on one tile of 128 tokens x TILE_K features; the grid is their number, see tile.tile_of.

    Forward: a is h. BACKWARD: a is dh1, b is dh3. With both directions the inputs are loaded, from the caches, and
    worked out again: see kernels.quantize. Tokens outside the tile's group, and features past K, are masked here.
    """
    tile, tile_k = tile_of(tl.program_id(0), tiles_t, tiles_k, BAND)
    _, _, first, read_end, write_end, base, tiles = place_tile(
        tile, tiles_t, T, T_OUT, group_ends_ptr, num_groups, TILE_T, GROUPS, BLOCKED
    )
    at = first.to(tl.int64) * stride_ht
    rows = read_end - first
    rows_out = tl.minimum(write_end, T) - first
    feature0 = tl.cast(0, tl.int64)
    for along_k in tl.static_range(2):
        if (along_k == 1 and ALONG_K) or (along_k == 0 and ALONG_T):
            h1 = _load(h1_ptr, at, stride_ht, stride_hk, rows, tile_k, K, along_k == 0, TILE_K, VEC)
            h3 = _load(h3_ptr, at, stride_ht, stride_hk, rows, tile_k, K, along_k == 0, TILE_K, VEC)
            s = sigmoid(h1)
            a = h1 * s * h3
            if BACKWARD:
                dh = _load(dh_ptr, at, stride_ht, stride_hk, rows, tile_k, K, along_k == 0, TILE_K, VEC)
                a = dh * h3 * s * (1.0 + h1 * (1.0 - s))
            if along_k == 1:
                store_along_k(
                    a, a_along_k_ptr, a_scale_k_ptr, scale_k_bytes, first.to(tl.int64), rows_out, tile, tile_k, K,
                    ROUNDING, BLOCKED, GROUPS, TILE_K,
                )  # fmt: skip
            else:
                store_along_t(
                    a, tl.max(magnitude_bits(a), 2), a_along_t_ptr, a_scale_t_ptr, scale_t_bytes, feature0, first,
                    write_end, tile, base, tiles, tile_k, K, T_OUT, ROUNDING, BLOCKED, GROUPS, TILE_K,
                )  # fmt: skip
            if BACKWARD:
                b = dh * h1 * s
                if along_k == 1:
                    store_along_k(
                        b, b_along_k_ptr, b_scale_k_ptr, scale_k_bytes, first.to(tl.int64), rows_out, tile, tile_k, K,
                        ROUNDING, BLOCKED, GROUPS, TILE_K,
                    )  # fmt: skip
                else:
                    store_along_t(
                        b, tl.max(magnitude_bits(b), 2), b_along_t_ptr, b_scale_t_ptr, scale_t_bytes, feature0, first,
                        write_end, tile, base, tiles, tile_k, K, T_OUT, ROUNDING, BLOCKED, GROUPS, TILE_K,
                    )  # fmt: skip


def _allocate(h1: Tensor, along_k: bool, along_t: bool, scale_layout: str, group_ends: Tensor | None) -> list[Tensor]:
    groups = 0 if group_ends is None else group_ends.shape[0]
    along = (*allocate_along_k(h1, scale_layout, groups),) if along_k else ()
    return [*along, *(allocate_along_t(h1, scale_layout, groups) if along_t else ())]


def _launch(
    inputs: list[Tensor], outputs: list[list[Tensor]], rounding: str, along_k: bool, along_t: bool,
    scale_layout: str, group_ends: Tensor | None,
) -> None:  # fmt: skip
    """inputs: [dh,] h1, h3.  outputs: of h, or of dh1 and dh3, each [data, scale] along K, then along T."""
    *dh, h1, h3 = inputs
    for tensor, name in zip(inputs, ("dh", "h1", "h3")[-len(inputs) :], strict=True):
        check_source(tensor, name, (2,))
        if tensor.shape != h1.shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, h1 is {tuple(h1.shape)}: they need the same shape")
    check_choices(rounding, scale_layout)
    if not (along_k or along_t):
        raise ValueError("along_k and along_t are both False: nothing to compute")
    rows, features = h1.shape
    if along_k:
        check_blocks(features, "the hidden dim of h1")
    num_groups, groups = check_groups(group_ends, h1, rows, BLOCK_SIZE if along_t else 1)
    if any(tensor.stride() != h1.stride() for tensor in inputs):
        *dh, h1, h3 = (tensor.contiguous() for tensor in inputs)
    blocked = scale_layout == BLOCKED
    rows_out = round_up(rows, BLOCK_SIZE)
    tiles_t = ceil_div(rows_out + GROUP_TILE * num_groups * blocked, GROUP_TILE)
    tiles_k = ceil_div(round_up(features, GROUP_TILE) if blocked else features, TILE_K)
    if tiles_t * tiles_k == 0:
        return
    # Directions that are not asked for get h1 in the place of their outputs, which is not touched.
    unused = [h1, h1]
    slots = [
        tensor
        for out in (outputs if len(outputs) == 2 else [*outputs, [h1] * len(outputs[0])])
        for tensor in ([*(out[:2] if along_k else unused), *(out[-2:] if along_t else unused)])
    ]
    launch(
        swiglu_kernel,
        tiles_t * tiles_k,
        (*(dh or [h1]), h1, h3, *slots, group_ends),
        (
            rows, rows_out, features, *h1.stride(),
            tiles_t, tiles_k, num_groups, slots[1].numel(), slots[3].numel(),
        ),
        (rounding, len(outputs) == 2, along_k, along_t, blocked, groups, TILE_K, VEC, BAND),
        NUM_WARPS,
    )  # fmt: skip


def swiglu(
    h1: Tensor, h3: Tensor, rounding: str, along_k: bool = True, along_t: bool = False, scale_layout: str = PLAIN,
    group_ends: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """h = silu(h1) * h3 in MXFP8: [data, scale] along K if asked for, then [data, scale] along T if asked for.

    Shapes, layouts and groups as in kernels.quantize.

    h1, h3: (T, K) fp32, bf16 or fp16, any strides, copied if theirs differ
    Raises: ValueError or TypeError for what the arguments above don't allow.
    """
    out = _allocate(h1, along_k, along_t, scale_layout, group_ends)
    _launch([h1, h3], [out], rounding, along_k, along_t, scale_layout, group_ends)
    return out


def swiglu_backward(
    dh: Tensor, h1: Tensor, h3: Tensor, rounding: str, along_k: bool = True, along_t: bool = False,
    scale_layout: str = PLAIN, group_ends: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """dh1 and dh3, the gradients of `swiglu`, in MXFP8: what `swiglu` returns for h, for dh1 and then for dh3."""
    outs = [_allocate(h1, along_k, along_t, scale_layout, group_ends) for _ in range(2)]
    _launch([dh, h1, h3], outs, rounding, along_k, along_t, scale_layout, group_ends)
    return [*outs[0], *outs[1]]


_OPTIONS = "str rounding, bool along_k=True, bool along_t=False, str scale_layout='plain', Tensor? group_ends=None"


def _fake(h1, h3, rounding, along_k=True, along_t=False, scale_layout=PLAIN, group_ends=None):
    return _allocate(h1, along_k, along_t, scale_layout, group_ends)


def _fake_backward(dh, h1, h3, rounding, along_k=True, along_t=False, scale_layout=PLAIN, group_ends=None):
    return [t for _ in range(2) for t in _allocate(h1, along_k, along_t, scale_layout, group_ends)]


register_op(f"swiglu(Tensor h1, Tensor h3, {_OPTIONS}) -> Tensor[]", swiglu, _fake)
register_op(
    f"swiglu_backward(Tensor dh, Tensor h1, Tensor h3, {_OPTIONS}) -> Tensor[]", swiglu_backward, _fake_backward
)
