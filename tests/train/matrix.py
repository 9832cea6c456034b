"""One process of two: a small Llama 4 trained in every way of `CASES` from the same weights and tokens, results kept.

Started by torchrun from test_matrix.py; on two GPUs with NCCL, else with gloo: on a CPU, or sharing one GPU. One start
serves all cases of one recipe.
"""

import os
import sys
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from tests.train import shared_gpu

if not torch.cuda.is_available():
    from mxfp8_titan import cpu_host

    cpu_host.install()
elif shared_gpu.used(2):
    shared_gpu.install()

from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.llama4 import llama4_args
from torchtitan.models.moe import utils as moe_utils
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec

from mxfp8_titan.preflight import meta_model, parse

WATCHED = ("layers.1.moe.router.gate.weight", "layers.0.attention.wq.weight", "tok_embeddings.weight",
           "layers.0.feed_forward.w2.weight", "layers.1.moe.experts.w2", "layers.1.moe.experts.w1")  # fmt: skip
MAX_NORM = 0.05
STEPS = 3
ROWS, TOKENS = 2, 24
"""Of a rank's batch: so few that neither they nor the padded rows that a rank's experts get, at most both ranks' and
128 more, reach a dim of any weight, and a tensor's shape tells what it is."""


@dataclass(frozen=True)
class Case:
    flags: tuple[str, ...] = ()
    mx: bool = True
    everything_to_one_expert: bool = False
    alignment: int = 8
    microbatches: int = 1
    gradients_of: str = ""
    """An earlier case whose gradients the optimizer gets, instead of this one's."""


ALWAYS = "--parallelism.fsdp_reshard_after_forward=always"
SELECTIVE = ("--activation_checkpoint.mode=selective",)
EP = ("--parallelism.expert_parallel_degree=2",)
CASES = {
    "bf16": Case(mx=False),
    "fsdp": Case(),
    "fsdp_again": Case(),
    "reshard_never": Case(("--parallelism.fsdp_reshard_after_forward=never",)),
    "reshard_always_ac_full": Case((ALWAYS, "--activation_checkpoint.mode=full")),
    "ac_op": Case((*SELECTIVE, "--activation_checkpoint.selective_ac_option=op")),
    "reshard_always_ac_every_second": Case((ALWAYS, *SELECTIVE, "--activation_checkpoint.selective_ac_option=2")),
    "accumulated": Case(microbatches=2),
    "ep": Case(EP),
    "ep_foreach": Case((*EP, "--optimizer.implementation=foreach"), gradients_of="ep"),
    "ep_for_loop_groups_of_128": Case((*EP, "--optimizer.implementation=for-loop"), alignment=128, gradients_of="ep"),
    "one_expert": Case(everything_to_one_expert=True),
    "ep_one_expert": Case(EP, everything_to_one_expert=True),
    "tp": Case(("--parallelism.tensor_parallel_degree=2",)),
}

PRODUCTS = ("reference_y", "reference_dx", "reference_dw", "hopper_rows_times", "hopper_over_t")


class Ops(TorchDispatchMode):
    """Counts this project's products, and the group sizes that they are given."""

    def __init__(self):
        super().__init__()
        self.count, self.sizes = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().removeprefix("mxfp8_titan::") in PRODUCTS:
            self.count += 1
            ends = args[[argument.name for argument in func._schema.arguments].index("group_ends")]
            if ends is not None:
                self.sizes |= set(ends.diff(prepend=ends.new_zeros(1)).tolist())
        return func(*args, **(kwargs or {}))


def job(case: Case, recipe: str = "auto"):
    mx = ("--model.converters=mx", "--mx.moe_fqns_prototype=experts", f"--mx.recipe_name={recipe}")
    return parse([
        "--job.custom_config_module=mxfp8_titan.job_config", "--model.name=llama4", "--model.flavor=matrix",
        f"--training.seq_len={TOKENS}", "--optimizer.lr=1e-3", "--activation_checkpoint.mode=none",
        *(mx if case.mx else ()), *case.flags,
    ])  # fmt: skip


def full_weights(device) -> dict:
    """The same on every rank and in every case."""
    model = meta_model(job(Case(mx=False)))
    model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=device)
    return model.state_dict()


def full(t: torch.Tensor) -> torch.Tensor:
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().float().cpu().clone()


def local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def run(case: Case, recipe: str, weights: dict, device, given: list[list[torch.Tensor]] | None = None) -> dict:
    """given: for each step this rank's part of each gradient, which the optimizer gets"""
    config = job(case, recipe)
    p = config.parallelism
    dims = ParallelDims(
        dp_shard=-1, dp_replicate=1, cp=1, tp=p.tensor_parallel_degree, pp=1, ep=p.expert_parallel_degree, etp=1,
        world_size=2,
    )  # fmt: skip
    dims.build_mesh()
    model = meta_model(config)
    build_model_converters(config, dims).convert(model)
    spec = get_train_spec("llama4")
    model = spec.parallelize_fn(model, dims, config)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=device)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, {k: v.clone() for k, v in weights.items()}, options=options)
    if case.everything_to_one_expert:
        for layer in model.layers.values():
            if layer.moe_enabled:
                layer.moe.expert_bias.zero_()[0] = 1e6
    optimizers = spec.build_optimizers_fn([model], config.optimizer, dims)
    moe_utils.set_token_group_alignment_size_m(case.alignment)

    batches = 2 if dims.dp_enabled else 1
    rank = dist.get_rank() if dims.dp_enabled else 0
    tokens = torch.randint(0, 256, (STEPS, batches, ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    result = {"losses": [], "norms": [], "local_gradients": []}
    with dist_utils.get_train_context(dims.tp_enabled)():
        for step in range(STEPS):
            ops, saved = Ops(), []
            loss = 0.0
            for rows in tokens[step, rank].to(device).chunk(case.microbatches):
                with torch.autograd.graph.saved_tensors_hooks(partial(noted, saved), lambda t: t):
                    with ops if step == 0 else torch.enable_grad():
                        prediction = model(rows[:, :-1])
                    part = spec.build_loss_fn(config)(prediction, rows[:, 1:]) / (batches * ROWS * TOKENS)
                if step == 0:
                    result["kept"] = kept_weights(saved, weights)
                    saved.clear()
                part.backward()
                loss += full(part.detach())
            if dims.dp_enabled:
                total = loss.to(device)
                dist.all_reduce(total)
                loss = total.cpu()
            if step == 0:
                parameters = dict(named_parameters(model))
                result["grads"] = {name: full(parameters[name].grad) for name in WATCHED}
                result["dtypes"] = sorted({str(t.dtype) for p in parameters.values() for t in (p, p.grad)})
                result["ops"], result["sizes"] = ops.count, sorted(ops.sizes)
            parts = [local(p.grad) for p in model.parameters()]
            result["local_gradients"].append([part.clone() for part in parts])
            if given is not None:
                torch._foreach_copy_(parts, given[step])
            norm = dist_utils.clip_grad_norm_(
                list(model.parameters()), MAX_NORM, foreach=True, ep_enabled=dims.ep_enabled
            )
            if step == 0:
                result["clipped"] = float(sum(full(p.grad).double().square().sum() for p in model.parameters()).sqrt())
            result["norms"].append(float(norm))
            result["losses"].append(float(loss))
            optimizers.step()
            optimizers.zero_grad()
    result["weights"] = {name: full(p) for name, p in named_parameters(model)}
    moe_utils.set_token_group_alignment_size_m(8)
    return result


def named_parameters(model):
    return ((name.replace("_checkpoint_wrapped_module.", ""), p) for name, p in model.named_parameters())


def noted(into: list[torch.Tensor], saved: torch.Tensor) -> torch.Tensor:
    into.append(saved)
    return saved


def kept_weights(saved: list[torch.Tensor], weights: dict) -> int:
    """Bytes that converted layers' unsharded weights still take when forward is over."""
    shapes = {w.shape for name, w in weights.items() if name.startswith("layers.0.") and w.dim() == 2}
    shapes |= {shape[::-1] for shape in shapes}
    found = {t.untyped_storage()._cdata: t for t in saved if t.shape in shapes}
    return sum(t.untyped_storage().nbytes() for t in found.values())


def main(path: str, recipe: str) -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if shared_gpu.used(2) or device.type == "cpu" else "nccl")
    # Embeddings add their gradients with atomics otherwise; new memory is filled with NaN, too.
    torch.use_deterministic_algorithms(True, warn_only=True)
    llama4_args["matrix"] = replace(llama4_args["debugmodel"], n_layers=2)
    weights = full_weights(device)
    results = {}
    for name, case in CASES.items():
        given = results[case.gradients_of]["local_gradients"] if case.gradients_of else None
        results[name] = run(case, recipe, weights, device, given)
    for result in results.values():
        del result["local_gradients"]
    if dist.get_rank() == 0:
        torch.save(results, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
