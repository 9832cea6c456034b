"""MXFP8 training for torchtitan 0.2.2: one model converter, `mx`, its quantization and its GEMMs.

Imports point down only: converter -> modules -> autograd -> backends -> kernels | reference -> format.

Importing the package does nothing else. torchtitan reaches it through a hook of its own,
`--job.custom_config_module=mxfp8_titan.job_config`, which brings `--experimental.custom_import=mxfp8_titan.plugin`.
"""

__version__ = "0.1.0"
