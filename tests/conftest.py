"""Without a GPU, torchtitan is pointed at the CPU before any test imports it. With one, GPU tests run by mark."""

import pytest
import torch

if not torch.cuda.is_available():
    from mxfp8_titan import cpu_host

    cpu_host.install()

MACHINES = {
    "gpu": ("any NVIDIA GPU", lambda capability: True),
    "hopper": ("an sm90 GPU (H100, H200)", lambda capability: capability == (9, 0)),
    "blackwell": ("an sm100 or sm103 GPU (B200, B300)", lambda capability: capability in ((10, 0), (10, 3))),
}


def pytest_collection_modifyitems(items):
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    for item in items:
        for mark, (machine, fits) in MACHINES.items():
            if item.get_closest_marker(mark) and (capability is None or not fits(capability)):
                item.add_marker(pytest.mark.skip(reason=f"runs on {machine}"))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def device() -> str:
    """Where a test that suits any device runs."""
    return "cuda" if torch.cuda.is_available() else "cpu"
