"""Kernels of attention as records: the facts of chips, the record, and the choice among those that plugins offer."""
