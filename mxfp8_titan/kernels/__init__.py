"""Triton kernels, one family a file; each equals the module of the same name in `reference`."""
