"""Imported once by the fork server, so that no process pays for it."""

import sparseprefill.adapters.demo.model
import sparseprefill.adapters.star.tensor
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3

from distributed import models

__all__ = ["models", "sparseprefill", "transformers"]
