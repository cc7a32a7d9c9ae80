"""Measures and checks the backend in vLLM's own engine: ``python -m sparseprefill.adapters.vllm.bench``.

`equal` compares tokens with vLLM's own attention, `ttft` times the first token of one prompt, `load` serves requests
that come over time, `decode` times steps that decode, `answers` asks a trained model, and `pages` times the executor
that reads keys and values through a block table. Only the last does without vLLM.
"""
