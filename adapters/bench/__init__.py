"""Benchmarks of one layer's attention, and of a whole model's prefill, against dense attention in the same run.

`case` says what is measured, `tables` which cases make up a table, `measure` does it. The command line and
``tests/benchmarks`` run the same cases.
"""
