"""Random tensors, group splits and strides for property tests, as hypothesis draws them.

Examples are derandomized: the same ones in every run, so that a test does not change its mind between two commits.
"""

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from mxfp8_titan.format import FLOOR, RCEIL

DTYPES = (torch.float32, torch.bfloat16)
ROUNDINGS = st.sampled_from([FLOOR, RCEIL])


def derandomized(examples: int):
    """Settings of a property test with that many examples."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@st.composite
def group_sizes(draw, multiple: int = 1, most: int = 96) -> tuple[list[int], int]:
    """(sizes of 1 to 6 groups, rows that belong to nobody)."""
    size = st.integers(0, most // multiple).map(lambda n: n * multiple)
    # Empty groups are half of what goes wrong.
    sizes = draw(st.lists(st.one_of(st.just(0), size), min_size=1, max_size=6))
    return sizes, draw(st.sampled_from([0, multiple, 3 * multiple]))


@st.composite
def values(draw, shape: tuple[int, ...], low: int = -133, high: int = 127, spread: int = 12) -> torch.Tensor:
    """Normal numbers times a power of two for each row, each column and each element, zeros among them.

    The powers lie between 2**low and 2**high; the largest magnitudes are those of fp32 and bf16, the smallest are
    subnormal in both.
    """
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    center = draw(st.integers(low, high))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    exponent = torch.full((), float(center), dtype=torch.float64)
    for dims in ((*shape[:-1], 1), (*shape[:-2], 1, shape[-1]), shape):
        exponent = exponent + torch.randint(-spread, spread + 1, dims, generator=generator)
    x = x * torch.exp2(exponent.clamp(low, high))
    largest = torch.finfo(torch.bfloat16).max
    x = x.clamp(-largest, largest)
    if draw(st.booleans()):
        x[torch.rand(shape, generator=generator) < draw(st.sampled_from([0.01, 0.9]))] = 0
    return x.to(draw(st.sampled_from(DTYPES)))


@st.composite
def strided(draw, x: torch.Tensor) -> torch.Tensor:
    """The numbers of `x` in another place: contiguous, transposed, every second column, or a slice."""
    how = draw(st.sampled_from(["contiguous", "transposed", "sliced", "spaced"]))
    if how == "transposed":
        return x.mT.contiguous().mT
    if how == "contiguous":
        return x.clone()
    rows, cols = x.shape[-2:]
    if how == "sliced":
        out = _rubbish(x, rows + 1, cols + 5)[..., 1:, 3 : 3 + cols]
    else:
        out = _rubbish(x, rows, 2 * cols)[..., ::2]
    return out.copy_(x)


def _rubbish(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    return torch.full((*x.shape[:-2], rows, cols), float("nan") if x.is_floating_point() else 255, dtype=x.dtype)


def ends_of(sizes: list[int], device="cpu") -> torch.Tensor:
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
