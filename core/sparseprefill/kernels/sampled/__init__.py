"""Exact attention of sampled query rows, and the tiles of its columns and diagonals."""
