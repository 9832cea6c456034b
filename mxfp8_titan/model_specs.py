"""torchtitan's model specs with three parts replaced: tokenizer builder, metrics processor and state dict adapter.

All are slots that a TrainSpec offers. The first trains the local tokenizer when it is asked for, and refuses one
that does not fit the model; the second stops a run whose loss is no longer finite, and can write its metrics to a file;
the third makes Hugging Face exports that can be saved.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.metrics import BaseLogger, MetricsProcessor, _get_metrics_rank
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.protocols import train_spec as train_specs
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec, register_train_spec
from torchtitan.tools.logging import logger

from mxfp8_titan import compilations, health, local_text
from mxfp8_titan.converter import MODELS


class NonFiniteLossError(FloatingPointError):
    """The loss became NaN or Inf; training on would waste the machine and poison the next checkpoint."""


class FiniteLossMetrics(MetricsProcessor):
    """torchtitan's metrics, and an error at the first logged loss or gradient norm that is not finite.

    The last step and each step that ends in a checkpoint are logged too: torchtitan saves after it logs, so that no
    checkpoint is written of weights that are no numbers. So is the last step before a trace, where measuring ends.
    Two metrics more: what was compiled since the last logged step, and how unevenly tokens were routed. With
    --mx.health_every, what each converted module loses; those steps are logged too.
    """

    tokens_per_expert: Sequence[torch.Tensor] = ()
    """Per MoE layer (E,) counts of the step to be logged; the trainer sets them."""
    compiled_before: int = 0

    def should_log(self, step: int) -> bool:
        checkpoint, last = self.job_config.checkpoint, self.job_config.training.steps
        saves = checkpoint.enable and step % checkpoint.interval == 0
        mx = getattr(self.job_config, "mx", None)
        before_trace = bool(mx and mx.trace_file) and step == last - mx.trace_steps - 1
        return super().should_log(step) or saves or before_trace or step == last or self._reads_health(step)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        compiled = compilations.count()
        extra = {**(extra_metrics or {}), "compile/count": compiled - self.compiled_before}
        self.compiled_before = compiled
        if self.tokens_per_expert:
            extra["routing/max_over_mean"] = imbalance(self.tokens_per_expert)
        if self._reads_health(step):
            extra |= self._health()
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)
        # A gradient norm that is not finite has already reached the weights, whatever this step's loss was.
        for name, value in (("loss", global_avg_loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                raise NonFiniteLossError(f"the {name} is {value} at step {step}: stopped before anything is saved")

    def _reads_health(self, step: int) -> bool:
        mx = getattr(getattr(self, "job_config", None), "mx", None)
        every = getattr(mx, "health_every", 0)
        return every > 0 and step % every == 0

    def _health(self) -> dict[str, float]:
        mesh = self.parallel_dims.get_optional_mesh("loss") if self.parallel_dims.dp_cp_enabled else None
        shares = health.read(self.model_parts, mesh and mesh.get_group())
        if shares:
            logger.info(health.summary(shares))
        return health.scalars(shares)


def imbalance(tokens_per_expert: Sequence[torch.Tensor]) -> float:
    """Tokens of the busiest expert over the mean of its layer, in the layer where that is largest. 1: balanced."""
    counts = torch.stack([count.float() for count in tokens_per_expert])
    return (counts.amax(1) / counts.mean(1).clamp(min=1e-9)).max().item()


def register() -> None:
    """Put these specs before torchtitan's own, for each model that a user has not registered a spec for."""
    for name in MODELS:
        if name not in train_specs._extra_train_specs:
            register_train_spec(name, _with_our_parts(get_train_spec(name)))


def _with_our_parts(spec: TrainSpec) -> TrainSpec:
    return replace(
        spec,
        build_tokenizer_fn=partial(_build_tokenizer, spec),
        build_metrics_processor_fn=_build_metrics_processor,
        state_dict_adapter=spec.state_dict_adapter and _with_contiguous_exports(spec.state_dict_adapter),
    )


def _with_contiguous_exports(adapter: type[BaseStateDictAdapter]) -> type[BaseStateDictAdapter]:
    """`adapter`, whose exports safetensors takes: Llama 4's returns experts as transposed views, which it refuses."""

    class Contiguous(adapter):
        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            return {name: tensor.contiguous() for name, tensor in super().to_hf(state_dict).items()}

    Contiguous.__name__ = Contiguous.__qualname__ = adapter.__name__
    return Contiguous


class JsonLines(BaseLogger):
    """Adds each step's metrics to a file, one JSON object a line, and passes them on to torchtitan's own loggers."""

    def __init__(self, path: str, others: BaseLogger) -> None:
        self.path, self.others = path, others
        Path(path).parent.mkdir(parents=True, exist_ok=True)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": step, **metrics}, default=float) + "\n")
        self.others.log(metrics, step)

    def close(self) -> None:
        self.others.close()


def _build_metrics_processor(job_config, parallel_dims, model_args=None, tag=None) -> MetricsProcessor:
    compilations.listen()
    processor = FiniteLossMetrics(job_config, parallel_dims, tag)
    mx = getattr(job_config, "mx", None)
    if mx and mx.metrics_file and torch.distributed.get_rank() == _get_metrics_rank(parallel_dims, job_config):
        processor.logger = JsonLines(mx.metrics_file, processor.logger)
    return processor


def _build_tokenizer(spec: TrainSpec, job_config) -> BaseTokenizer:
    """torchtitan's own tokenizer, from the folder that model.hf_assets_path names or from the local text.

    Raises: ValueError when the tokenizer has more entries than the model's embedding.
    """
    model = job_config.model
    if model.hf_assets_path == local_text.TOKENIZER_PATH:
        is_local = job_config.training.dataset == local_text.DATASET
        text_path = (is_local and job_config.training.dataset_path) or DATASETS[local_text.DATASET].path
        model.hf_assets_path = local_text.tokenizer_folder(text_path)
    tokenizer = spec.build_tokenizer_fn(job_config)
    entries, rows = tokenizer.get_vocab_size(), spec.model_args[model.flavor].vocab_size
    if entries > rows:
        raise ValueError(
            f"the tokenizer in {model.hf_assets_path} has {entries} entries but {model.name} {model.flavor} has "
            f"vocab_size {rows}: token ids would index past the embedding. Use a smaller tokenizer "
            f"(--model.hf_assets_path={local_text.TOKENIZER_PATH} has {local_text.VOCAB_SIZE}) or another flavor."
        )
    return tokenizer
