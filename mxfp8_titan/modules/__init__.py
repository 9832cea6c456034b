"""MXFP8 modules: torchtitan's own classes with another forward. Parameters, names and initialisation are untouched."""
