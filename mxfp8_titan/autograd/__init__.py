"""The three GEMMs of a layer as autograd Functions: y in forward, dx and dw in backward."""
