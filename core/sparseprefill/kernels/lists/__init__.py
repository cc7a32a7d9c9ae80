"""Kernels on maps of tiles and index lists."""
