"""Triton and Gluon kernels, one family a file; its first lines name the reference that defines the answer."""
