import dataclasses

import pytest
import torch

from mxfp8_titan.bench import peers
from mxfp8_titan.bench.quantize import OPS
from mxfp8_titan.format import RCEIL
from mxfp8_titan.reference.quantize import quantize_along_k, quantize_along_t

BY_NAME = {op.name: op for op in OPS}


def _arguments(name, device="cpu"):
    experts = BY_NAME[name].shapes[0][:-2]
    return BY_NAME[name].prepare(torch.randn(*(2 for _ in experts), 64, 96, device=device).bfloat16())


def _bytes(outs):
    return [out.view(torch.uint8) for out in outs]


@pytest.mark.parametrize("name", peers.REFERENCES)
def test_a_reference_compiles_as_one_graph_with_the_same_bytes(name):
    arguments = (*_arguments(name), RCEIL)
    graph = torch.compile(peers.REFERENCES[name], fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(_bytes(graph(*arguments)), _bytes(peers.REFERENCES[name](*arguments)), rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in peers.REFERENCES if name != "quantize_32x32_both"])
def test_torchao_does_the_same_work(name):
    pytest.importorskip("torchao", reason="compares with torchao 0.18.0")
    triton_kernel = name == "quantize_aligned_along_k"
    if triton_kernel and not torch.cuda.is_available():
        pytest.skip("runs on any NVIDIA GPU: it is a Triton kernel")
    arguments = _arguments(name, "cuda" if triton_kernel else "cpu")
    reference = peers.REFERENCES[name](*arguments, RCEIL)
    with torch.compiler.set_stance("force_eager"):
        outs = peers.torchao()[name](*arguments)
    peers.check(outs, reference)
    assert len(outs) == (1 if triton_kernel else len(reference))
    if not (triton_kernel or name.startswith("swiglu")):
        torch.testing.assert_close(_bytes(outs), _bytes(reference), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda x: (), "returns nothing"),
        (lambda x: (quantize_along_k(x, RCEIL).data.float(),), "output 0 is .*float32.*, the kernel's is .*float8"),
        (lambda x: (quantize_along_k(x, RCEIL).data.t().contiguous().t(),), "output 0 is .*\\(1, 64\\)"),
        (lambda x: (quantize_along_k(x, RCEIL).data[:32],), "output 0 is .*\\(32, 64\\)"),
        (lambda x: (quantize_along_t(x, RCEIL).data,), r"output 0: 9\d% of its bytes are not the kernel's"),
        (lambda x: (quantize_along_k(x, RCEIL).data, quantize_along_k(x * 64, RCEIL).scale), "output 1: 100%"),
    ],
)
def test_less_work_or_other_work_is_refused(wrong, says):
    x = torch.randn(64, 64)
    with pytest.raises(ValueError, match=says):
        peers.check(wrong(x), quantize_along_k(x, RCEIL))


def _beside(monkeypatch, by_torchao):
    op = dataclasses.replace(
        BY_NAME["quantize_along_k"], shapes=((64, 64),), run=lambda x, r, layout: quantize_along_k(x, r)
    )
    times = iter((10.0, 41.0, 20.0))
    monkeypatch.setattr(peers, "median_us", lambda call: next(times))
    monkeypatch.setattr(peers, "compiled", lambda function: function)
    monkeypatch.setattr(peers, "torchao", by_torchao)
    return peers.beside(op, "cpu")


def test_the_row_is_over_the_faster_of_the_others(monkeypatch, capsys):
    row = _beside(monkeypatch, lambda: {"quantize_along_k": lambda x: quantize_along_k(x, RCEIL)})
    assert row.us == {"here": 10.0, "torch.compile": 41.0, "torchao": 20.0}
    assert row.value == 2.0
    assert row.detail == "64x64 plain, RCEIL"
    assert capsys.readouterr().out == ""


def _not_installed():
    raise ImportError("No module named 'torchao'")


@pytest.mark.parametrize(
    ("by_torchao", "why"),
    [
        (_not_installed, "ImportError: No module named 'torchao'"),
        (dict, "NotImplementedError: it has no such function"),
        (lambda: {"quantize_along_k": lambda x: ()}, "ValueError: returns nothing"),
    ],
)
def test_a_version_that_does_not_run_leaves_its_cell_empty_and_says_why(monkeypatch, capsys, by_torchao, why):
    row = _beside(monkeypatch, by_torchao)
    assert row.us == {"here": 10.0, "torch.compile": 41.0, "torchao": None}
    assert row.value == 4.1
    assert capsys.readouterr().out == f"quantize_along_k by torchao: not measured, {why}\n"


def test_without_any_other_version_there_is_no_row(monkeypatch):
    monkeypatch.setitem(peers.REFERENCES, "quantize_along_k", lambda x, rounding: ())
    assert _beside(monkeypatch, _not_installed) is None


def test_no_op_is_begun_when_the_time_is_over(monkeypatch, capsys):
    monkeypatch.setattr(peers, "beside", lambda op: op.name)
    ops = [BY_NAME[name] for name in peers.REFERENCES]
    assert list(peers.measure(ops)) == list(peers.REFERENCES)
    assert list(peers.measure(OPS[:1], seconds=-1)) == []
    assert "quantize_along_k by others: not measured" in capsys.readouterr().out
