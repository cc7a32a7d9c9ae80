"""Triton kernels, one family a file. Importing this package does not import triton; its modules do."""
