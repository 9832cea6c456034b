"""What torchtitan's `--experimental.custom_import` imports: registers the converter, the dataset and the flavors.

Importing it twice, or reloading it, registers once.
"""

import torchtitan.protocols.model_converter as model_converter

from mxfp8_titan import flavors, local_text, model_specs
from mxfp8_titan.converter import MXConverter

if "mx" not in model_converter._registry_model_converter_cls:
    model_converter.register_model_converter(MXConverter, "mx")
local_text.register()
flavors.register()
model_specs.register()
