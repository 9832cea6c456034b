from dataclasses import replace
from typing import get_args

import pytest

from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.backends.select import FAST_BACKENDS, Device, select
from mxfp8_titan.job_config import AUTO, MX, RECIPES

CPU = Device("the CPU (no NVIDIA GPU)", None)
A100 = Device("NVIDIA A100", (8, 0))
H200 = Device("NVIDIA H200", (9, 0))
B200 = Device("NVIDIA B200", (10, 0))
B300 = Device("NVIDIA B300", (10, 3))
RTX5090 = Device("NVIDIA GeForce RTX 5090", (12, 0))


@pytest.mark.parametrize("device", [CPU, A100, H200, B200, B300, RTX5090])
@pytest.mark.parametrize("name", ["mxfp8_emulated", "mxfp8_emulated_rceil"])
def test_emulation_runs_anywhere(name, device):
    assert select(name, device).backend is REFERENCE


@pytest.mark.parametrize(
    ("name", "needs", "wrong"),
    [
        ("mxfp8_cublas", r"10.0 \(sm100\) or 10.3 \(sm103\)", [CPU, A100, H200, RTX5090]),
        ("mxfp8_cublas_rceil", r"10.0 \(sm100\) or 10.3 \(sm103\)", [CPU, A100, H200, RTX5090]),
        ("mxfp8_hopper", r"9.0 \(sm90\)", [CPU, A100, B200, B300, RTX5090]),
    ],
)
def test_a_named_recipe_on_the_wrong_device_names_the_device_the_need_and_the_flag(name, needs, wrong):
    for device in wrong:
        with pytest.raises(ValueError, match=f"{name} needs a GPU of compute capability {needs}") as error:
            select(name, device)
        assert device.name in str(error.value)
        assert "--mx.recipe_name=auto" in str(error.value)


NATIVE = [("mxfp8_cublas", B200), ("mxfp8_cublas_rceil", B300), ("mxfp8_hopper", H200)]


@pytest.fixture
def without_fast_backends(monkeypatch):
    monkeypatch.setattr("mxfp8_titan.backends.select.FAST_BACKENDS", {})


@pytest.fixture
def fast(monkeypatch):
    """A backend that stands for each native recipe's own."""
    backend = replace(REFERENCE, name="fast", home=f"{__name__}:FAST")
    monkeypatch.setitem(globals(), "FAST", backend)
    monkeypatch.setattr("mxfp8_titan.backends.select.FAST_BACKENDS", {name: backend.home for name, _ in NATIVE})
    return backend


@pytest.mark.parametrize(("name", "device"), NATIVE)
def test_a_named_recipe_on_its_device_runs_its_own_backend(name, device, fast):
    assert select(name, device).backend is fast


@pytest.mark.parametrize(("name", "device"), NATIVE)
def test_the_backend_of_each_native_recipe_lives_where_it_says(name, device):
    assert select(name, device).backend.home == FAST_BACKENDS[name]


@pytest.mark.parametrize(("name", "device"), NATIVE)
def test_a_named_recipe_without_a_backend_names_what_emulates_it(name, device, without_fast_backends):
    emulation = "mxfp8_emulated" if name == "mxfp8_cublas" else "mxfp8_emulated_rceil"
    with pytest.raises(ValueError, match=f"no backend in this version.*recipe_name=auto.*recipe_name={emulation} to"):
        select(name, device)


@pytest.mark.parametrize(
    ("device", "name"), [(H200, "mxfp8_hopper"), (B200, "mxfp8_cublas_rceil"), (B300, "mxfp8_cublas_rceil")]
)
def test_auto_takes_the_device_s_own_recipe(device, name, fast):
    choice = select(AUTO, device)
    assert (choice.recipe_name, choice.backend) == (name, fast)
    assert device.name in choice.why


@pytest.mark.parametrize("device", [CPU, A100, RTX5090])
def test_auto_emulates_where_no_recipe_is_native(device, fast):
    choice = select(AUTO, device)
    assert (choice.recipe_name, choice.backend) == ("mxfp8_emulated_rceil", REFERENCE)
    assert f"no recipe uses MX or FP8 tensor cores on {device}, so MXFP8 is emulated" in choice.why


@pytest.mark.parametrize(("device", "name"), [(H200, "mxfp8_hopper"), (B300, "mxfp8_cublas_rceil")])
def test_auto_emulates_where_the_native_backend_is_missing_and_says_so(device, name, without_fast_backends):
    choice = select(AUTO, device)
    assert (choice.recipe_name, choice.backend) == ("mxfp8_emulated_rceil", REFERENCE)
    assert f"{name} suits {device.name}" in choice.why
    assert "no backend for it yet" in choice.why


def test_the_flag_s_choices_are_auto_and_the_recipes():
    assert get_args(MX.__annotations__["recipe_name"]) == (AUTO, *RECIPES)
