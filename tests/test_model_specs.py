from dataclasses import fields
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torchtitan.protocols.train_spec import get_train_spec

from mxfp8_titan import local_text, plugin  # noqa: F401 - registers the specs
from mxfp8_titan.converter import MODELS
from mxfp8_titan.model_specs import FiniteLossMetrics, NonFiniteLossError


def _config(path, flavor="debugmodel", dataset="local_text", dataset_path=None):
    return SimpleNamespace(
        model=SimpleNamespace(name="llama4", flavor=flavor, hf_assets_path=path),
        training=SimpleNamespace(dataset=dataset, dataset_path=dataset_path),
    )


@pytest.mark.parametrize("name", MODELS)
def test_only_tokenizer_metrics_and_exports_differ_from_torchtitan_s_own_spec(name):
    ours, own = get_train_spec(name), import_module(f"torchtitan.models.{name}").get_train_spec()
    differing = {f.name for f in fields(own) if getattr(ours, f.name) != getattr(own, f.name)}
    assert differing == {"build_tokenizer_fn", "build_metrics_processor_fn", "state_dict_adapter"}
    assert issubclass(ours.state_dict_adapter, own.state_dict_adapter)


def test_the_sentinel_path_asks_for_the_local_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("some text " * 500)
    config = _config(local_text.TOKENIZER_PATH, dataset_path=str(tmp_path / "a.txt"))
    tokenizer = get_train_spec("llama4").build_tokenizer_fn(config)
    assert tokenizer.get_vocab_size() <= 2048
    assert config.model.hf_assets_path.startswith(str(tmp_path / "cache"))


def test_any_other_path_is_torchtitan_s_own_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("some text " * 500)
    folder = local_text.tokenizer_folder(str(tmp_path / "a.txt"), vocab_size=300)
    config = _config(folder, dataset="c4")
    assert get_train_spec("llama4").build_tokenizer_fn(config).get_vocab_size() <= 300
    assert config.model.hf_assets_path == folder


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text(" ".join(str(i * i) for i in range(20000)))
    folder = local_text.tokenizer_folder(str(tmp_path / "a.txt"), vocab_size=4000)
    with pytest.raises(ValueError, match="has 4000 entries but llama4 debugmodel has vocab_size 2048"):
        get_train_spec("llama4").build_tokenizer_fn(_config(folder))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_first_loss_or_gradient_norm_that_is_not_finite_raises(bad, monkeypatch):
    logged = []
    monkeypatch.setattr("torchtitan.components.metrics.MetricsProcessor.log", lambda self, *a, **k: logged.append(a))
    metrics = object.__new__(FiniteLossMetrics)
    metrics.log(1, 2.0, 2.0, 1.0)
    with pytest.raises(NonFiniteLossError, match="the loss is .* at step 2"):
        metrics.log(2, bad, bad, 1.0)
    with pytest.raises(NonFiniteLossError, match="the gradient norm is .* at step 3"):
        metrics.log(3, 2.0, 2.0, bad)
    assert len(logged) == 3


def test_the_last_step_and_every_step_that_saves_are_logged():
    metrics = object.__new__(FiniteLossMetrics)
    metrics.job_config = SimpleNamespace(
        metrics=SimpleNamespace(log_freq=10),
        checkpoint=SimpleNamespace(enable=True, interval=4),
        training=SimpleNamespace(steps=19),
    )
    assert [step for step in range(1, 20) if metrics.should_log(step)] == [1, 4, 8, 10, 12, 16, 19]
    metrics.job_config.checkpoint.enable = False
    assert [step for step in range(1, 20) if metrics.should_log(step)] == [1, 10, 19]


def test_the_step_at_which_measuring_ends_is_logged_before_a_trace():
    metrics = object.__new__(FiniteLossMetrics)
    metrics.job_config = SimpleNamespace(
        metrics=SimpleNamespace(log_freq=10),
        checkpoint=SimpleNamespace(enable=False),
        training=SimpleNamespace(steps=19),
        mx=SimpleNamespace(trace_file="t.json", trace_steps=3),
    )
    assert [step for step in range(1, 20) if metrics.should_log(step)] == [1, 10, 15, 19]


def test_what_was_compiled_and_how_tokens_were_routed_is_logged(monkeypatch):
    logged = []
    monkeypatch.setattr("torchtitan.components.metrics.MetricsProcessor.log", lambda self, *a: logged.append(a[-1]))
    counts = iter([5, 5, 7])
    monkeypatch.setattr("mxfp8_titan.compilations.count", lambda: next(counts))
    metrics = object.__new__(FiniteLossMetrics)
    metrics.log(1, 2.0, 2.0, 1.0, {"lr": 0.5})
    metrics.tokens_per_expert = [torch.tensor([4.0, 4.0]), torch.tensor([6.0, 2.0])]
    metrics.log(2, 2.0, 2.0, 1.0)
    metrics.log(3, 2.0, 2.0, 1.0)
    assert logged[0] == {"lr": 0.5, "compile/count": 5}
    assert logged[1] == {"compile/count": 0, "routing/max_over_mean": 1.5}
    assert logged[2]["compile/count"] == 2
