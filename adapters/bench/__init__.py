"""Benchmarks of one layer's attention, and of a whole model's prefill, against dense attention in the same run.

`case` says what is measured, `measure` does it.
"""
