"""Kernel tests run where Triton can: on a GPU, or on CPU tensors in a process started with TRITON_INTERPRET=1."""

import pytest
import torch
import triton

INTERPRETED = triton.knobs.runtime.interpret


@pytest.fixture
def device():
    """The device whose tensors a kernel can take here."""
    if INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("runs on any NVIDIA GPU, or with TRITON_INTERPRET=1 set for the whole process")
    return torch.device("cuda")


@pytest.fixture
def gpu():
    """A GPU: what the test shows, the interpreter cannot."""
    if INTERPRETED or not torch.cuda.is_available():
        pytest.skip("runs on any NVIDIA GPU")
    return torch.device("cuda")


@pytest.fixture
def poisoned(monkeypatch):
    """Every tensor from new_empty or empty_strided is full of 0xA5, so that a byte nobody writes shows."""

    def poison(make):
        def poisoned(*args, **kwargs):
            out = make(*args, **kwargs)
            out.view(torch.uint8).fill_(0xA5)
            return out

        return poisoned

    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty_strided", poison(torch.empty_strided))
