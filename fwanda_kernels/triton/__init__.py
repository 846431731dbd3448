"""Triton backend: one module per op family, each op with the signature of the reference, imported only when tried."""
