"""FQN patterns -> which modules are converted, which are not, and why. Reads the model, changes nothing.

One pattern language: an entry is one or more whole dotted components and matches anywhere in a module's name.
`wk` matches layers.3.attention.wk but not layers.3.attention.wkv; `layers.0` matches block 0 and all inside it but
not layers.01; `experts` does not match shared_experts. There are no wildcards and no regular expressions.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torchtitan.models.moe.moe import GroupedExperts, TokenChoiceTopKRouter

from mxfp8_titan.format import BLOCK_SIZE
from mxfp8_titan.job_config import MX

LINEAR = "linear"
EXPERTS = "experts"


@dataclass(frozen=True)
class Decision:
    """What happens to one module. `reason` says why it stays as it is; it is empty when the module is converted."""

    fqn: str
    kind: str
    shape: tuple[int, ...]
    """(N, K) of a linear, (E, hidden, dim) of experts."""
    reason: str = ""

    @property
    def converted(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class Plan:
    """One decision per dense linear and per expert module, in model order."""

    decisions: tuple[Decision, ...]

    def converted(self, kind: str) -> list[Decision]:
        return [d for d in self.decisions if d.kind == kind and d.converted]

    def kept(self) -> dict[str, list[Decision]]:
        """Decisions that keep their module in bf16, by reason."""
        groups: dict[str, list[Decision]] = {}
        for decision in self.decisions:
            if not decision.converted:
                groups.setdefault(decision.reason, []).append(decision)
        return groups


def fold_layer_numbers(fqn: str) -> str:
    """layers.3.attention.wk -> layers.*.attention.wk, for people who read one line per kind of module."""
    return ".".join("*" if part.isdigit() else part for part in fqn.split("."))


def matches(entry: str, fqn: str) -> bool:
    """Whether `entry`'s components stand in `fqn` in a row."""
    want, have = entry.split("."), fqn.split(".")
    return any(have[i : i + len(want)] == want for i in range(len(have) - len(want) + 1))


def make_plan(
    model: nn.Module,
    mx: MX,
    tensor_parallel: int = 1,
    experts_tensor_parallel: int = 1,
    max_features: int | None = None,
) -> Plan:
    """The conversion plan for `model` (meta parameters will do).

    tensor_parallel: degree that shards dense linears' in or out features
    experts_tensor_parallel: degree that shards the experts' hidden dim
    max_features: the recipe's, if it has one
    Raises: ValueError for an entry that matches nothing (with near matches), for experts this project cannot
        convert, and when nothing would be converted.
    """
    _check_entries(model, mx)
    decisions = []
    for fqn, module in model.named_modules():
        if isinstance(module, nn.Linear):
            reason = _why_linear_stays(model, fqn, module, mx, tensor_parallel, max_features)
            decisions.append(Decision(fqn, LINEAR, tuple(module.weight.shape), reason))
        elif _is_experts(module):
            reason = _why_experts_stay(fqn, module, mx, experts_tensor_parallel, max_features)
            shape = tuple(module.w1.shape) if isinstance(module, GroupedExperts) else ()
            decisions.append(Decision(fqn, EXPERTS, shape, reason))
    plan = Plan(tuple(decisions))
    if not any(d.converted for d in decisions):
        reasons = "; ".join(f"{len(group)} x {reason}" for reason, group in plan.kept().items())
        raise ValueError(
            "the mx converter would convert nothing: "
            + (reasons or "the model has no nn.Linear and no GroupedExperts")
            + ". Remove mx from --model.converters for a bf16 run, or change --mx.filter_fqns, "
            "--mx.moe_fqns_prototype or --mx.dense."
        )
    return plan


def _why_linear_stays(
    root: nn.Module, fqn: str, linear: nn.Linear, mx: MX, tensor_parallel: int, max_features: int | None
) -> str:
    if isinstance(root.get_submodule(fqn.rpartition(".")[0]), TokenChoiceTopKRouter):
        return "router, always kept"
    if not mx.dense:
        return "dense linears are off (mx.dense=false)"
    for entry in mx.filter_fqns:
        if matches(entry, fqn):
            return f"filter_fqns: {entry}"
    if type(linear) is not nn.Linear:
        return f"is {type(linear).__name__}, not a plain nn.Linear"
    sizes = {"out_features": linear.out_features, "in_features": linear.in_features}
    return _why_sizes_do_not_fit(sizes, tensor_parallel, max_features)


def _why_experts_stay(fqn: str, experts: nn.Module, mx: MX, tensor_parallel: int, max_features: int | None) -> str:
    if not any(matches(entry, fqn) for entry in mx.moe_fqns_prototype):
        return "not in moe_fqns_prototype"
    if type(experts) is not GroupedExperts:
        raise ValueError(
            f"mx.moe_fqns_prototype matches {fqn}, which is {type(experts).__name__}; only torchtitan's GroupedExperts "
            "(w1, w2, w3, no biases) can be converted. Leave it out of --mx.moe_fqns_prototype to train it in bf16."
        )
    _, hidden, dim = experts.w1.shape
    return _why_sizes_do_not_fit({"dim": dim}, 1, max_features) or _why_sizes_do_not_fit(
        {"hidden_dim": hidden}, tensor_parallel, max_features
    )


def _why_sizes_do_not_fit(sizes: dict[str, int], shards: int, max_features: int | None) -> str:
    # Which of the two dims a tensor-parallel style shards is not known before it is applied, so both must fit.
    for name, size in sizes.items():
        if size % (BLOCK_SIZE * shards) != 0:
            over = f" over tensor-parallel degree {shards}" if shards > 1 else ""
            return f"{name} {size}{over} is not a multiple of {BLOCK_SIZE}"
        if max_features is not None and size > max_features:
            return f"{name} {size} is more than {max_features}, the longest row the recipe takes"
    return ""


def _is_experts(module: nn.Module) -> bool:
    """GroupedExperts, and experts of another kind: a class so named, with 3D parameters of its own."""
    stacked = any(p.dim() == 3 for p in module.parameters(recurse=False))
    return isinstance(module, GroupedExperts) or (type(module).__name__.endswith("Experts") and stacked)


def _check_entries(model: nn.Module, mx: MX) -> None:
    names = [name for name, _ in model.named_modules() if name]
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    experts = [name for name, module in model.named_modules() if _is_experts(module)]
    if mx.user_gave_filter:
        for entry in mx.filter_fqns:
            _check_matches("filter_fqns", entry, linears, "dense linear", names)
    for entry in mx.moe_fqns_prototype:
        hint = ""
        if any(matches(entry, name) for name in linears):
            hint = " It names dense linears, which are converted unless --mx.filter_fqns keeps them."
        _check_matches("moe_fqns_prototype", entry, experts, "expert module", names, hint)


def _check_matches(key: str, entry: str, candidates: list[str], kind: str, names: list[str], hint: str = "") -> None:
    if any(matches(entry, name) for name in candidates):
        return
    near = [name for name in _near_matches(entry, candidates) if name]
    near_text = f" Near matches: {', '.join(near)}." if near else ""
    if not candidates:
        near_text = f" The model has no {kind}."
    elif not near:
        near_text = f" The last components there are: {', '.join(sorted({n.split('.')[-1] for n in candidates}))}."
    if any(quote in entry for quote in "'\""):
        hint += " It holds a quotation mark, left over from shell quoting."
    raise ValueError(
        f"mx.{key} entry {entry!r} matches no {kind} of the model. Entries are whole dotted components, without "
        f"wildcards.{near_text}{hint}"
    )


def _near_matches(entry: str, candidates: Iterable[str]) -> list[str]:
    """Up to three runs of components, as long as the entry, that look like it."""
    length = entry.count(".") + 1
    runs = {
        ".".join(name.split(".")[i : i + length]) for name in candidates for i in range(name.count(".") + 2 - length)
    }
    bare = entry.strip("'\"*^$").lower()
    near = difflib.get_close_matches(bare, sorted(runs), n=3, cutoff=0.6)
    return near or [run for run in sorted(runs) if len(bare) > 2 and (bare in run or run in bare)][:3]
