import pytest

from mxfp8_titan.backends.reference import REFERENCE
from mxfp8_titan.backends.select import FAST_BACKENDS, Device, select
from mxfp8_titan.job_config import AUTO, RECIPES

CPU = Device("CPU, no NVIDIA GPU", None)
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


@pytest.mark.parametrize(
    ("name", "device"), [("mxfp8_cublas", B200), ("mxfp8_cublas_rceil", B300), ("mxfp8_hopper", H200)]
)
def test_a_named_recipe_on_its_device_runs_its_own_backend_or_stops(name, device):
    if name in FAST_BACKENDS:
        assert select(name, device).backend is FAST_BACKENDS[name]
    else:
        with pytest.raises(ValueError, match="has no backend in this version.*--mx.recipe_name=auto"):
            select(name, device)


@pytest.mark.parametrize(
    ("device", "native"),
    [(CPU, None), (A100, None), (RTX5090, None), (H200, "mxfp8_hopper"), (B300, "mxfp8_cublas_rceil")],
)
def test_auto_takes_the_device_s_recipe_or_emulates_and_says_why(device, native):
    selection = select(AUTO, device)
    assert selection.recipe_name == (native if native in FAST_BACKENDS else "mxfp8_emulated_rceil")
    assert device.name in selection.why
    if native:
        assert native in selection.why or native == selection.recipe_name


def test_every_recipe_has_a_rule():
    for name in RECIPES:
        for device in (CPU, H200, B200):
            try:
                select(name, device)
            except ValueError as error:
                assert "--mx.recipe_name=auto" in str(error)
