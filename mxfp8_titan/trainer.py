"""torchtitan's Trainer, which also says what it trains, keeps the routing of logged steps, and traces its last steps.

The measured steps pay for none of it: the counts are copied on the device, and only in steps that are logged; the
profiler starts after the last step that is measured.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torchtitan.components.metrics import _get_metrics_rank
from torchtitan.config import JobConfig
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

INVENTORY = "What is trained: "
"""Start of the log line that report/inventory.py reads."""
TRACE_KEY = "mxfp8_titan"
"""Key of a trace's JSON under which report/trace.py finds the number of steps and their seconds."""


class ObservedTrainer(Trainer):
    """Trains as torchtitan's does."""

    def __init__(self, job_config: JobConfig) -> None:
        super().__init__(job_config)
        logger.info(INVENTORY + json.dumps(inventory(self.model_parts, self.metrics_processor.num_flops_per_token)))
        mx = getattr(job_config, "mx", None)
        self.tracer = None
        if mx and mx.trace_file:
            warm_up = job_config.training.steps - mx.trace_steps
            if torch.distributed.get_rank() == _get_metrics_rank(self.parallel_dims, job_config):
                self.tracer = Tracer(Path(mx.trace_file), warm_up, mx.trace_steps, self.device)

    def forward_backward_step(self, **inputs) -> torch.Tensor:
        loss = super().forward_backward_step(**inputs)
        if self.metrics_processor.should_log(self.step):
            # Before the optimizer's load balancing clears them.
            self.metrics_processor.tokens_per_expert = tokens_per_expert(self.model_parts)
        return loss

    def train_step(self, data_iterator: Iterator) -> None:
        if self.tracer:
            self.tracer.before(self.step)
        super().train_step(data_iterator)
        if self.tracer:
            self.tracer.after(self.step)


class Tracer:
    """A profiler trace of `steps` steps after step `warm_up`, in which the profiler starts and nothing is kept.

    On a GPU it records kernels and no operators: operators would slow the host down, and with it the steps. Without
    one it records operators.
    """

    def __init__(self, path: Path, warm_up: int, steps: int, device: torch.device) -> None:
        self.path, self.warm_up, self.steps = path, warm_up, steps
        self.on_gpu = device.type == "cuda"
        self.profiler = profile(
            activities=[ProfilerActivity.CUDA if self.on_gpu else ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        )
        self.started = 0.0

    def before(self, step: int) -> None:
        if step == self.warm_up:
            self.profiler.start()

    def after(self, step: int) -> None:
        if step < self.warm_up:
            return
        if step in (self.warm_up, self.warm_up + self.steps):
            self._finish_kernels()
        if step == self.warm_up + self.steps:
            measured = {"steps": self.steps, "wall_s": time.perf_counter() - self.started}
            self.profiler.add_metadata_json(TRACE_KEY, json.dumps(measured))
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self.profiler.step()
        if step == self.warm_up:
            self.started = time.perf_counter()
        if step == self.warm_up + self.steps:
            self.profiler.stop()
            logger.info(f"Trace of {self.steps} steps: {self.path}")

    def _finish_kernels(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def tokens_per_expert(model_parts: list[nn.Module]) -> list[torch.Tensor]:
    """For each MoE layer, how many of this rank's tokens went to each expert (E,), since the counts were last cleared:
    after every step where torchtitan balances the load. Checkpointed layers count twice, all experts alike."""
    layers = [module for part in model_parts for module in part.modules() if hasattr(module, "tokens_per_expert")]
    # A compiled module and the one inside it are both modules; they share the counts.
    counts = {id(layer.tokens_per_expert): layer.tokens_per_expert for layer in layers}
    return [count.detach().clone() for count in counts.values()]


def inventory(model_parts: list[nn.Module], flops_per_token: float) -> dict:
    """What report/inventory.py reads: per class of linears and experts their number and the weights that multiply one
    token, what converted ones run on, and whether routing is real. Of this rank's pipeline stage."""
    dense: dict[str, list[int]] = {}
    experts: dict[str, list[int]] = {}
    recipes, backends, gemms, wgrads, forced = set(), set(), set(), set(), set()
    top_k = 1
    modules = [module for part in model_parts for module in part.modules()]
    for module in modules:
        if hasattr(module, "_debug_force_load_balance"):
            forced.add(bool(module._debug_force_load_balance))
            top_k = module.top_k
    for module in modules:
        # FSDP2 puts its name before a class's own.
        name = type(module).__name__.removeprefix("FSDP")
        if isinstance(module, GroupedExperts):
            weights = sum(w.numel() for w in (module.w1, module.w2, module.w3)) * top_k // module.num_experts
            found = experts.setdefault(name, [0, 0])
        elif isinstance(module, nn.Linear):
            weights, found = module.weight.numel(), dense.setdefault(name, [0, 0])
        else:
            continue
        found[0] += 1
        found[1] += weights
        if hasattr(module, "recipe"):
            recipes.add(module.recipe.name)
            backends.add(module.backend.name)
            gemms.add(module.recipe.gemm + (" (fast accumulation)" if module.recipe.fast_accumulation else ""))
            wgrads.add("mxfp8" if module.recipe.wgrad_in_mxfp8 else "bf16")
    return {
        "flops_per_token": flops_per_token,
        "dense": dense,
        "experts": experts,
        "recipe": ", ".join(sorted(recipes)),
        "backend": ", ".join(sorted(backends)),
        "gemm": ", ".join(sorted(gemms)),
        "wgrad": ", ".join(sorted(wgrads)),
        "routing": "none" if not forced else "forced-balanced" if True in forced else "real",
    }
