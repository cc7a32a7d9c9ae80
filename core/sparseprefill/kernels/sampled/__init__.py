"""Exact attention of sampled query rows."""
