"""What aligned exponents change in real tensors: activations, weights and gradients of a training run.

python -m mxfp8_titan.bench.alignment --job.config_file configs/llama4_scout_2layer.toml --training.steps=3 [flags]

Trains the job in emulated MXFP8, eager, and compares each operand of each product with itself: every tensor that a
converted module multiplies, in each direction it is multiplied. Prints one row a kind of module and operand, and
writes them to the file named by MXFP8_TITAN_ALIGNMENT, if it is set. docs/numerics.md shows a run.
"""

import itertools
import json
import math
import os
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mxfp8_titan.backends.interface import Backend
from mxfp8_titan.bench.results import markdown_table
from mxfp8_titan.format import BLOCK_SIZE
from mxfp8_titan.reference.quantize import dequantize, e8m0_from_amax, e8m0_to_float, quantize_along_k
from mxfp8_titan.reference.quantize_aligned import encode

SPANS = (128, 0)
"""Elements over which exponents are aligned; 0 is the whole row."""

SAMPLED_ROWS = 4096
"""Rows of a tensor that are compared, evenly spread."""


@dataclass
class Totals:
    """Sums over the elements of all tensors of one kind."""

    elements: int = 0
    signal: float = 0.0
    noise: float = 0.0
    """Squared error of 1x32 blocks."""
    noise_aligned: tuple[float, ...] = (0.0,) * len(SPANS)
    extra: float = 0.0
    """Squared difference between exponents aligned over the row and 1x32."""
    same: int = 0
    """Elements whose value is the same in both."""
    underflows: int = 0
    """Elements that are zero under alignment and not in 1x32."""

    def add(self, x: Tensor, rounding: str) -> None:
        """Add one tensor, (rows, features), features along the product's sum."""
        step = max(1, x.shape[0] // SAMPLED_ROWS)
        x = x[::step].float()
        if x.numel() == 0:
            return
        exact = dequantize(quantize_along_k(x, rounding), torch.float32)
        aligned = [align(x, span, rounding) for span in SPANS]
        self.elements += x.numel()
        self.signal += _square(x)
        self.noise += _square(x - exact)
        self.noise_aligned = tuple(total + _square(x - q) for total, q in zip(self.noise_aligned, aligned, strict=True))
        row = aligned[SPANS.index(0)]
        self.extra += _square(row - exact)
        self.same += int((row == exact).sum())
        self.underflows += int(((row == 0) & (exact != 0)).sum())

    def row(self) -> dict[str, float]:
        """The columns of the table: dB, shares."""
        return {
            "SQNR 1x32": _db(self.signal, self.noise),
            **{
                f"aligned over {span or 'the row'}": _db(self.signal, noise)
                for span, noise in zip(SPANS, self.noise_aligned, strict=True)
            },
            "identical": self.same / self.elements,
            "underflow": self.underflows / self.elements,
            "extra error / MX error": math.sqrt(self.extra / self.noise) if self.noise else 0.0,
        }


def align(x: Tensor, span: int, rounding: str) -> Tensor:
    """x (rows, K) quantized with one exponent for every `span` elements of a row, 0 for all, as fp32."""
    rows, features = x.shape
    span = span or features
    padded = torch.nn.functional.pad(x, (0, -features % span)).view(rows, -1, span)
    byte = e8m0_from_amax(padded.abs().amax(-1, keepdim=True), rounding)
    values = encode(padded, byte).float() * e8m0_to_float(byte)
    return values.view(rows, -1)[:, :features]


def _square(x: Tensor) -> float:
    return x.double().square().sum().item()


def _db(signal: float, noise: float) -> float:
    return 10 * math.log10(signal / noise) if noise and signal else float("inf")


def record(model: torch.nn.Module, totals: dict[tuple[str, str], Totals]) -> None:
    """Have every converted module of `model` add its operands to `totals`, by (kind of module, operand)."""
    # Imports torchtitan, which must wait until the host is prepared.
    from mxfp8_titan.selection import fold_layer_numbers

    for name, module in model.named_modules():
        if hasattr(module, "backend"):
            module.backend = _recording(module.backend, fold_layer_numbers(name), totals)


def _recording(backend: Backend, kind: str, totals: dict[tuple[str, str], Totals]) -> Backend:
    """`backend`, which notes what it multiplies. Operands of the reference are unquantized."""

    def note(name: str, x: Tensor, recipe, ends: Tensor | None) -> None:
        bounds = [0, x.shape[0]] if ends is None else [0, *ends.tolist()]
        totals[kind, f"{name} along features"].add(x[: bounds[-1]], recipe.rounding)
        for first, last in itertools.pairwise(bounds):
            whole = first + (last - first) // BLOCK_SIZE * BLOCK_SIZE
            totals[kind, f"{name} along tokens"].add(x[first:whole].t(), recipe.rounding)

    def y(rows, weights, ends, recipe, out_dtype):
        note("input", rows[0], recipe, ends)
        for w in weights:
            totals[kind, "weight along K"].add(w.reshape(-1, w.shape[-1]), recipe.rounding)
            totals[kind, "weight along N"].add(w.mT.reshape(-1, w.shape[-2]), recipe.rounding)
        return backend.y(rows, weights, ends, recipe, out_dtype)

    def dx(rows, weights, ends, recipe, out_dtype):
        note("gradient", rows[0], recipe, ends)
        return backend.dx(rows, weights, ends, recipe, out_dtype)

    return replace(backend, y=y, dx=dx)


def main() -> None:
    """Train the job on the command line for its few steps and print the table."""
    from mxfp8_titan.train import check_or_refuse, parse_or_refuse, prepare_host

    fixed = ["--model.converters=mx", "--mx.moe_fqns_prototype=experts", "--mx.recipe_name=mxfp8_emulated_rceil"]
    sys.argv[1:] = [*sys.argv[1:], *fixed, "--compile.no-enable"]
    prepare_host()
    job_config = parse_or_refuse(sys.argv[1:])
    check_or_refuse(job_config)
    from torchtitan.train import Trainer

    trainer = Trainer(job_config)
    totals: dict[tuple[str, str], Totals] = defaultdict(Totals)
    for part in trainer.model_parts:
        record(part, totals)
    trainer.train()
    rows = [{"module": module, "operand": operand, **total.row()} for (module, operand), total in totals.items()]
    cells = [[f"{v:.4g}" if isinstance(v, float) else v for v in row.values()] for row in rows]
    print(markdown_table(rows[0], cells))
    if path := os.environ.get("MXFP8_TITAN_ALIGNMENT"):
        Path(path).write_text(json.dumps(rows, indent=1) + "\n")
    trainer.close()


if __name__ == "__main__":
    main()
