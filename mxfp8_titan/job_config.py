"""The [mx] section of torchtitan's configuration, and the frozen Recipe made from it.

torchtitan merges this module's JobConfig into its own when it is named by --job.custom_config_module (or the
TOML's [job] custom_config_module). Naming it is enough: the default of experimental.custom_import is ours too.

No `from __future__ import annotations` here: torchtitan 0.2.2 reads the field types as classes, and with strings
it would leave the TOML table a raw dict and accept typos.
"""

import difflib
from dataclasses import dataclass, field, replace
from typing import Literal

from mxfp8_titan.format import FLOOR, RCEIL

DEFAULT_FILTER_FQNS = ("output", "router.gate", "wk", "wv")


class _DefaultList(list):
    """A list that the user did not write: its entries may match nothing (Llama 3 has no router.gate)."""


@dataclass(frozen=True)
class Recipe:
    """How tensors are quantized and multiplied. Everything below the converter reads this and not the [mx] section."""

    name: str
    rounding: str
    """FLOOR or RCEIL: how a block's scale is taken from its largest element."""
    capabilities: tuple[tuple[int, int], ...] = ()
    """Exact CUDA compute capabilities it needs; empty: runs on any device. A set and not a minimum: sm120 is newer
    than sm100 but lacks its block-scaled tensor cores."""
    max_features: int | None = None
    """Longest dim of a weight that it takes."""
    wgrad_in_mxfp8: bool = True
    """Whether dw is an MXFP8 product; otherwise bf16."""
    gemm: str = "auto"
    """Whose GEMMs run: PyTorch's (library), this project's (own), or by kind of product (auto), see backends/."""
    fast_accumulation: bool = False
    """Whether partial sums stay in the FP8 tensor core's few bits."""


_SM90, _SM100, _SM103 = (9, 0), (10, 0), (10, 3)

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("mxfp8_cublas", FLOOR, (_SM100, _SM103)),
        Recipe("mxfp8_cublas_rceil", RCEIL, (_SM100, _SM103)),
        Recipe("mxfp8_hopper", RCEIL, (_SM90,), max_features=32768),
        Recipe("mxfp8_emulated", FLOOR),
        Recipe("mxfp8_emulated_rceil", RCEIL),
    )
}
AUTO = "auto"


@dataclass
class MX:
    """MXFP8 conversion, active when model.converters contains mx."""

    recipe_name: Literal[
        "auto",
        "mxfp8_cublas",
        "mxfp8_cublas_rceil",
        "mxfp8_hopper",
        "mxfp8_emulated",
        "mxfp8_emulated_rceil",
    ] = "auto"
    """Format, rounding and backend. auto picks the fastest this GPU has and logs why. mxfp8_cublas (FLOOR) and
    mxfp8_cublas_rceil need sm100 or sm103, mxfp8_hopper needs sm90; mxfp8_emulated (FLOOR) and mxfp8_emulated_rceil
    run anywhere, slowly. A named recipe never falls back to another."""

    filter_fqns: list[str] = field(default_factory=lambda: _DefaultList(DEFAULT_FILTER_FQNS))
    """Dense linears that stay in bf16: whole dotted components, anywhere in the name (wk keeps layers.3.attention.wk;
    layers.0 keeps all of block 0). An entry that matches nothing is an error."""

    moe_fqns_prototype: list[str] = field(default_factory=list)
    """Expert modules to convert, by the same rule; experts means all of them. Empty: experts stay in bf16."""

    dense: bool = True
    """Whether dense linears are converted. With --mx.no-dense only experts are."""

    wgrad: Literal["mxfp8", "bf16"] = "mxfp8"
    """Precision of the weight-gradient GEMMs."""

    gemm: Literal["auto", "library", "own"] = "auto"
    """GEMMs of the fast recipes: PyTorch's (library), this project's kernels (own), or auto: on Hopper this project's
    for experts and PyTorch's for dense linears, on Blackwell PyTorch's where this build of it has them."""

    fast_accumulation: bool = False
    """mxfp8_hopper only, library GEMMs only. Faster and unsafe: Hopper's FP8 tensor cores then keep about 14 bits of
    every partial sum, and data with a mean loses the result (27 dB at K = 5120, 5 dB at 131072, where full
    accumulation keeps 51), dw above all."""

    metrics_file: str = ""
    """File to which each logged step's metrics are added, one JSON object a line; converters or not. Empty: none."""

    trace_file: str = ""
    """File for a profiler trace of the last trace_steps steps, by the rank that logs the loss; a name that ends in .gz
    is compressed. Needs `python -m mxfp8_titan.train` (as scripts/llama4.sh starts). Empty: none."""

    trace_steps: int = 3
    """Steps in the trace. The step before them starts the profiler and is not in it."""

    health_every: int = 0
    """Every so many steps, log for each converted module what aligned exponents lose (a row's blocks on its largest
    exponent, as mxfp8_hopper multiplies; with another recipe, what they would lose): elements that are zero only
    because of it (underflow), blocks of 32 that become zeros (zero_blocks), elements at +-448 (saturated), as shares
    over the steps since the last time. Of the input, the weights and the output's gradient, compiled or not, as y and
    dx multiply them; not of dw's operands and not of what is between the linears of a SwiGLU MLP. Each step looks at
    64 rows of each, other ones the next. Data-parallel ranks are added up; tensor-parallel shards and pipeline stages
    are the logging rank's own. 0: off, at no cost."""

    def __post_init__(self) -> None:
        for name in ("filter_fqns", "moe_fqns_prototype"):
            setattr(self, name, _split_entries(name, getattr(self, name)))
        for name, allowed in (
            ("recipe_name", (AUTO, *RECIPES)),
            ("wgrad", ("mxfp8", "bf16")),
            ("gemm", ("auto", "library", "own")),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(
                    f"mx.{name} is {value!r}, needs one of: {', '.join(allowed)}.{did_you_mean(value, allowed)}"
                )
        for name in ("metrics_file", "trace_file"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"mx.{name} is {getattr(self, name)!r}, needs a path")
        if not isinstance(self.trace_steps, int) or isinstance(self.trace_steps, bool) or self.trace_steps < 1:
            raise ValueError(f"mx.trace_steps is {self.trace_steps!r}, needs a whole number from 1 up")
        if not isinstance(self.health_every, int) or isinstance(self.health_every, bool) or self.health_every < 0:
            raise ValueError(
                f"mx.health_every is {self.health_every!r}, needs a whole number of steps from 1 up, or 0 for off"
            )
        for name in ("dense", "fast_accumulation"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"mx.{name} is {getattr(self, name)!r}, needs true or false")
        if self.fast_accumulation and self.gemm == "own":
            raise ValueError(
                "mx.fast_accumulation is true and mx.gemm is own, but this project's kernels accumulate in full only: "
                "drop one of them"
            )

    @property
    def user_gave_filter(self) -> bool:
        """Whether filter_fqns was written by the user, so that every entry has to match something."""
        return not isinstance(self.filter_fqns, _DefaultList)


@dataclass
class Experimental:
    """torchtitan's section of this name, with another default."""

    custom_import: str = "mxfp8_titan.plugin"
    """Module imported before training; the default registers the mx converter, the local_text dataset and the Scout
    flavors. A module of your own has to import mxfp8_titan.plugin itself."""


@dataclass
class JobConfig:
    """What torchtitan merges into its own JobConfig."""

    mx: MX = field(default_factory=MX)
    experimental: Experimental = field(default_factory=Experimental)


def did_you_mean(word: object, candidates: object) -> str:
    """' Did you mean a, b?' for the candidates closest to `word`, or nothing."""
    near = difflib.get_close_matches(str(word), [str(c) for c in candidates], n=3, cutoff=0.6)
    return f" Did you mean {', '.join(near)}?" if near else ""


def _split_entries(name: str, value: object) -> list[str]:
    """Entries of a comma string or of a list (whose items may be comma strings too), blanks stripped.

    Raises: TypeError for anything but strings, ValueError for an empty entry such as a trailing comma leaves.
    """
    if isinstance(value, _DefaultList):
        return value
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise TypeError(f"mx.{name} is {value!r}, needs a list of names or a comma-separated string")
    if not any(item.strip() for item in items):
        return []
    entries = [entry.strip() for item in items for entry in item.split(",")]
    if "" in entries:
        raise ValueError(f"mx.{name} is {value!r}: it has an empty entry; remove the extra comma")
    return entries


def recipe_from(mx: MX, name: str) -> Recipe:
    """The Recipe called `name`, with what else the [mx] section chooses.

    Raises: ValueError for fast accumulation with a recipe that has no such choice.
    """
    if mx.fast_accumulation and name != "mxfp8_hopper":
        raise ValueError(f"mx.fast_accumulation is true, and recipe {name} always accumulates in full: drop the flag")
    return replace(
        RECIPES[name],
        wgrad_in_mxfp8=mx.wgrad == "mxfp8",
        gemm="library" if mx.fast_accumulation else mx.gemm,
        fast_accumulation=mx.fast_accumulation,
    )
