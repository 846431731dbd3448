"""Triton kernels: a module for each family of ops, with the names and arguments of its ops."""

from importlib.util import find_spec

if find_spec("triton") is None:
    raise ImportError("the triton package is not installed")
