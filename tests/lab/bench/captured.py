"""q, k, v of the embedded model on one of its own prompts, as one layer of a larger model.

Its KV heads, two in each of six layers, become the KV heads of one layer, and the query heads of each are repeated to
the wanted number. A smaller head dimension is padded with zeros, which leaves every logit as it was; the model's own
scale is kept. Nothing is repeated along the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from attrs import evolve
from torch import Tensor
from torch.nn import functional

from lab.frontier.layers import layer_calls
from sparseprefill.call import AttentionCall
from sparseprefill.errors import ParameterError

from .case import call_of
from .shape import Shape


def inputs(shape: Shape, kind: str, seed: int, device: torch.device) -> AttentionCall:
    """Captured calls too, besides the kinds of `call_of`."""
    if kind != "captured":
        return call_of(shape, kind, seed, device)
    return _kept(shape, seed, device)


@lru_cache(maxsize=1)
def _kept(shape: Shape, seed: int, device: torch.device) -> AttentionCall:
    found = captured_call(shape, seed, device)
    return evolve(found, q=found.q[:, :, -shape.queries :])


def captured_call(shape: Shape, seed: int, device: torch.device) -> AttentionCall:
    """One call of so many heads. ParameterError where the sizes do not suit the model; ImportError without the
    extra ``hf``."""
    from sparseprefill.adapters.demo.model import load_config, load_model, load_tokenizer
    from sparseprefill.adapters.demo.tasks import key_value_prompts
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = load_config()
    if shape.length > config.max_position_embeddings:
        raise ParameterError(
            f"length is {shape.length}: pass at most {config.max_position_embeddings} for captured inputs"
        )
    if shape.head_dim < config.head_dim:
        raise ParameterError(f"head_dim is {shape.head_dim}: pass {config.head_dim} or more for captured inputs")
    if shape.batch != 1:
        raise ParameterError(f"batch is {shape.batch}: captured inputs are one prompt; pass 1")
    group, ratio = shape.heads // shape.kv_heads, config.num_attention_heads // config.num_key_value_heads
    if group % ratio:
        raise ParameterError(
            f"heads is {shape.heads}: pass a multiple of {ratio} for each KV head with captured inputs"
        )
    model = load_model(shape.torch_dtype, device)
    ids = torch.tensor(key_value_prompts(load_tokenizer(), shape.length, 1, seed), device=device)
    calls = layer_calls(model, ids)
    first = calls[0]
    # The last layers first, whose heads differ most from plain locality.
    found = [(call, head) for call in reversed(calls) for head in range(call.kv_heads)]
    taken = [found[i % len(found)] for i in range(shape.kv_heads)]
    q = torch.cat([c.q[:, h * ratio : (h + 1) * ratio].repeat(1, group // ratio, 1, 1) for c, h in taken], 1)
    k, v = (torch.cat([getattr(c, name)[:, h : h + 1] for c, h in taken], 1) for name in ("k", "v"))
    wide: Callable[[Tensor], Tensor] = lambda x: functional.pad(x, (0, shape.head_dim - x.shape[-1]))  # noqa: E731
    return AttentionCall(wide(q), wide(k), wide(v), scale=first.softmax_scale)
