"""Hugging Face transformers: run a model's prefill through any method, without touching the model's code."""

from __future__ import annotations

from .api import attach, detach, handle_of, register

__all__ = ["attach", "detach", "handle_of", "register"]
