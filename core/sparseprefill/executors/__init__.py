"""Executors: they turn a plan into output and know no method."""
