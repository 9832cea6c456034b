"""Measurements of the kernels against copies and peers; run by scripts/bench.py on a GPU."""
