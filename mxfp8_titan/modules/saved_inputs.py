"""Which converted layers read an input that the model saves for backward whatever they do.

Such a layer saves that input too and quantizes it again for dw, rather than FP8 data beside it: a byte an element less.
Where the neighbour that saves it is frozen (wk and wv, or the router), or attention runs as plain matrix products, it
is a byte more instead. Gradients are right either way.
"""

from torch import nn
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.llama4.model import model as llama4
from torchtitan.models.moe.moe import MoE
from torchtitan.models.qwen3.model import model as qwen3

from mxfp8_titan.modules.feed_forward import MXFP8SharedExperts
from mxfp8_titan.modules.linear import MXFP8Linear

_ATTENTIONS = (llama3.Attention, llama4.Attention, qwen3.Attention)


def mark_saved_inputs(model: nn.Module) -> None:
    """Set `input_is_saved` on the converted layers of `model` whose input is saved anyway, in place.

    wq, wk and wv read one input, so that each saves what another does; the attention between saves its output, wo's
    input; a router saves what the shared experts beside it read.
    """
    for module in model.modules():
        layers = []
        if isinstance(module, _ATTENTIONS):
            layers = [module.wq, module.wk, module.wv, module.wo]
        elif isinstance(module, MoE) and module.shared_experts is not None:
            layers = [module.shared_experts, module.shared_experts.w1, module.shared_experts.w3]
        for layer in layers:
            if isinstance(layer, (MXFP8Linear, MXFP8SharedExperts)):
                layer.input_is_saved = True
