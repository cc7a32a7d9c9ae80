"""Options of every launch, beside those of `settings`."""

from __future__ import annotations

OPTIONS = {"enable_fp_fusion": True}
"""Fused multiply-add is allowed, as it was by default up to Triton 3.9; the interpreter takes no notice."""
