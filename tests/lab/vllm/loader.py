"""Makes `weights` one of vLLM's formats of weights. To be imported when vLLM is there and an engine about to start."""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from .weights import fill

FORMAT = "sparseprefill-random"


class RandomLoader(BaseModelLoader):
    """Fills the parameters before vLLM lays them out for its kernels."""

    def download_model(self, model_config: Any) -> None:
        """See BaseModelLoader: nothing is to be had."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """See BaseModelLoader."""
        fill(model, int(model_config.seed or 0))


register_model_loader(FORMAT)(RandomLoader)
