import pytest

from mxfp8_titan.bench.grouped_linear import LARGE, Case, _rows


def _case(recipe, shape, groups, speedup, share):
    m, n, k = shape
    return Case(m, n, k, groups, f"mxfp8_hopper {recipe}", speedup, 1.0, speedup, 1.0, 1.0, 1.0, share, share)


def test_figures_are_the_worst_and_the_mean_of_the_cases_they_name():
    small = (16384, 1536, 5120)
    cases = [
        _case("library", LARGE, 1, 1.2, 0.7),
        _case("library", LARGE, 8, 1.4, 0.7),
        _case("library", small, 1, 0.9, 0.5),
        _case("auto", LARGE, 1, 2.0, 0.9),
        _case("auto", LARGE, 8, 1.6, 0.95),
        _case("auto", small, 1, 1.0, 0.85),
    ]
    values = {row.id: row.value for row in _rows(cases, ("library", "auto"))}
    assert values == {
        "grouped_large_library": 1.2,
        "grouped_large": 1.6,
        "grouped_geomean": pytest.approx((2.0 * 1.6 * 1.0) ** (1 / 3), abs=1e-3),
        "grouped_worst": 1.0,
        "share_of_limit": 0.85,
    }
