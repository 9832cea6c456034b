"""Where the three GEMMs run. One file a backend; select.py picks one and is the only reader of device capability."""
