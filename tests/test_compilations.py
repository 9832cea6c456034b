import torch
import triton

from mxfp8_titan import compilations


def test_graphs_of_torch_compile_are_counted_when_they_are_made():
    before = compilations.count()
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(torch.ones(2))
    once = compilations.count()
    compiled(torch.ones(2))
    assert (once - before, compilations.count() - once) == (1, 0)


def test_triton_s_kernels_are_counted_once_and_another_listener_still_hears_of_them(monkeypatch):
    heard = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **compiled: heard.append(compiled))
    compilations.listen()
    compilations.listen()
    before = compilations.count()
    triton.knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=False)
    assert (compilations.count() - before, len(heard)) == (1, 1)
