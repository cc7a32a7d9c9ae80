"""Measures and checks the attention backend in vLLM's own engine: ``python -m lab.vllm`` (from tests/).

`equal` compares tokens with vLLM's own attention, `ttft` times the first token of one prompt, `load` serves requests
that come over time, `decode` times steps that decode, and `answers` asks a trained model. `pages` times the executor
that reads keys and values through a block table, and `requests` several requests in one launch; these two do without
vLLM. All need the extra ``cli``.
"""

from __future__ import annotations

from .app import app

if __name__ == "__main__":
    app()
