"""Measures and checks the backend in vLLM's own engine: ``python -m sparseprefill.adapters.vllm.bench``.

`equal` compares tokens with vLLM's own attention, `ttft` times the first token, and `pages` the executor that reads
keys and values through a block table. Only the first two need vLLM.
"""
