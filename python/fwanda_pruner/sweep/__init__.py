"""Sweeps: many settings on one model.

`recipe` reads what to run, `run` runs it, `tables` and `figures` show the results.
"""
