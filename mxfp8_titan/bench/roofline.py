"""What the published peaks of a B200 allow, on paper: no GPU is used. docs/backends.md shows it, and a test holds that.

python -m mxfp8_titan.bench.roofline

A GEMM takes the longer of its FLOPs at peak and its bytes at peak, every operand and result moved once. Quantization
takes its bytes: x and dy are read in bf16 once and written in FP8 for two products, w is read once per product.
Nothing else costs anything here, so that real speed-ups are smaller, unless bf16 misses its own peak by more.
"""

from dataclasses import dataclass

from mxfp8_titan.bench.results import markdown_table
from mxfp8_titan.bench.shapes import GROUPED

SCALE = 1 + 1 / 32
"""Bytes of an MXFP8 element with its share of a scale."""


@dataclass(frozen=True)
class Peaks:
    """Dense FLOP/s and bytes/s of one GPU."""

    bf16: float
    fp8: float
    memory: float


B200 = Peaks(2.25e15, 4.5e15, 8e12)
"""Source: NVIDIA HGX B200 data sheet, per GPU, without sparsity: bf16 18 and FP8 36 PFLOP/s for eight, 8 TB/s."""

SCOUT = {"wq": (5120, 5120), "wo": (5120, 5120), "shared w1 w3": (16384, 5120), "shared w2": (5120, 8192)}
"""Converted dense linears of a Llama 4 Scout layer: out and in features."""
SCOUT_EXPERTS = {"w1 w3": (16384, 5120), "w2": (5120, 8192)}
SCOUT_REST = 2 * 1024 * 5120
"""Weights of a layer that stay in bf16: wk and wv."""
SCOUT_OUTPUT = 202048 * 5120


def step_us(tokens: int, n: int, k: int, groups: int, peaks: Peaks) -> tuple[float, float, float]:
    """us of y, dx and dw together: (in bf16, in MXFP8 from quantized operands, to quantize these)."""
    flop = 2 * tokens * n * k
    sides = tokens * k, groups * n * k, tokens * n
    bf16 = fp8 = 0.0
    for result in range(3):
        operands = sum(size for i, size in enumerate(sides) if i != result)
        bf16 += max(flop / peaks.bf16, 2 * sum(sides) / peaks.memory)
        fp8 += max(flop / peaks.fp8, (SCALE * operands + 2 * sides[result]) / peaks.memory)
    x, w, dy = sides
    quantized = (2 + 2 * SCALE) * (x + dy) + (4 + 2 * SCALE) * w
    return bf16 * 1e6, fp8 * 1e6, quantized / peaks.memory * 1e6


def grouped_rows(peaks: Peaks = B200) -> list[tuple]:
    """Forward and backward of each grouped shape: us in bf16, of the MXFP8 GEMMs and of quantization, speed-up."""
    rows = []
    for tokens, n, k, groups in GROUPED:
        bf16, fp8, quantize = step_us(tokens, n, k, groups, peaks)
        rows.append(
            (tokens, n, k, groups, f"{bf16:.0f}", f"{fp8:.0f}", f"{quantize:.0f}", f"{bf16 / (fp8 + quantize):.2f}")
        )
    return rows


def scout_rows(tokens: int = 16384, peaks: Peaks = B200) -> list[tuple]:
    """One training step of Scout with some layers: GEMMs in bf16 against those of a variant, attention not counted."""
    rows = []
    for layers in (2, 4, 48):
        dense = [step_us(tokens, n, k, 1, peaks) for n, k in SCOUT.values()]
        experts = [step_us(tokens, n, k, 16, peaks) for n, k in SCOUT_EXPERTS.values()]
        rest = 6 * tokens * (layers * SCOUT_REST + SCOUT_OUTPUT) / peaks.bf16 * 1e6
        all_bf16 = rest + layers * sum(case[0] for case in dense + experts)
        for name, converted in (("dense", dense), ("dense + experts", dense + experts)):
            saved = layers * sum(case[0] - case[1] - case[2] for case in converted)
            rows.append((layers, name, f"{all_bf16 / 1e3:.1f}", f"{(all_bf16 - saved) / 1e3:.1f}",
                         f"{all_bf16 / (all_bf16 - saved):.2f}"))  # fmt: skip
    return rows


if __name__ == "__main__":
    columns = "M", "N", "K", "experts", "bf16 us", "MXFP8 GEMMs us", "quantization us", "speed-up"
    print(markdown_table(columns, grouped_rows()))
    print(markdown_table(("layers", "converted", "bf16 ms", "here ms", "speed-up"), scout_rows()))
