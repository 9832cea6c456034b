"""MXFP8 training for torchtitan 0.2.2: one model converter, `mx`, its quantization and its GEMMs.

Data flows one way, and each layer imports only those below it:

    job_config -> selection -> converter -> modules -> autograd -> backends -> kernels | reference -> format

Importing the package does nothing else. torchtitan reaches it through two of its own hooks:
`--job.custom_config_module=mxfp8_titan.job_config` and `--experimental.custom_import=mxfp8_titan.plugin`.
"""

__version__ = "0.1.0"
