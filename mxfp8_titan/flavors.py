"""Llama4 flavors that fit few GPUs: Llama4 Scout's real layers, fewer of them, and a small vocabulary.

A layer has attention with 40 query and 8 key-value heads of 128, a router over 16 experts, the experts and one
shared expert of hidden size 8192, all at dim 5120: 2.20 B parameters.
"""

import copy
from dataclasses import replace

from torchtitan.models.llama4 import llama4_args

from mxfp8_titan.local_text import VOCAB_SIZE

SCOUT = "17bx16e"
LAYER_COUNTS = (1, 2, 4)


def register() -> None:
    """Add scout_1layer, scout_2layer and scout_4layer to Llama4's flavors."""
    for layers in LAYER_COUNTS:
        # Copied deeply: torchtitan writes into a flavor's MoEArgs when it reads the job's config.
        args = replace(copy.deepcopy(llama4_args[SCOUT]), n_layers=layers, vocab_size=VOCAB_SIZE)
        llama4_args.setdefault(f"scout_{layers}layer", args)
