"""Hugging Face transformers: run a model's prefill through any method, without touching the model's code."""

from __future__ import annotations

from .api import attach, detach

__all__ = ["attach", "detach"]
