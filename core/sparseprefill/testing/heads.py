"""Query, key and value tensors of a layer whose heads differ in character, after rotary embedding.

The structure lies where trained models have it. Fast rotary pairs hold one constant vector in all keys, so that what
queries read there depends on the distance alone: a peak at 0 makes a head local, peaks elsewhere are slashes. Slow
pairs, which hardly turn over the whole prompt, hold what depends on the key: the sink, salient columns, and the topics
of stripes and spans, which queries of some passages look for and others do not. The query heads of a group share the
keys, and each reads them in its own way. On all of it lies noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparseprefill.errors import ParameterError
from sparseprefill.testing.characters import named
from sparseprefill.testing.content import KEY_NOISE, QUERY_NOISE, mix
from sparseprefill.testing.rotary import Noise, Rotary, rotate

CHUNK = 32768


def head_tensors(
    *,
    q_len: int,
    kv_len: int | None = None,
    batch: int = 1,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    value_dim: int | None = None,
    q_offset: int | None = None,
    characters: Sequence[str] | None = None,
    theta: float | None = None,
    seed: int = 0,
    strided: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """q ``[B, Hq, Nq, D]``, k ``[B, Hkv, Nkv, D]`` and v ``[B, Hkv, Nkv, Dv]``, up to rounding the same on all devices.

    characters: names of `CHARACTERS` for the query heads in turn; by default `LAYER`, a mix for 32 heads.
    theta: base of the rotary embedding; by default Llama 3's, 500,000 for up to 8,192 tokens, stretched for longer
    prompts as NTK-aware scaling does. strided: token-major storage, as projections of a model give it.

    Time, and memory beyond the result, grow linearly with the length. Raises ParameterError.
    """
    kv_len = q_len if kv_len is None else kv_len
    value_dim = head_dim if value_dim is None else value_dim
    for name, value in (("batch", batch), ("kv_heads", kv_heads), ("q_len", q_len), ("value_dim", value_dim)):
        if value < 1:
            raise ParameterError(f"{name} is {value}: pass a positive integer")
    if heads < 1 or heads % kv_heads:
        raise ParameterError(f"heads is {heads}: pass a multiple of the {kv_heads} kv_heads")
    first = kv_len - q_len if q_offset is None else q_offset
    if not 0 <= first <= kv_len - q_len:
        raise ParameterError(f"q_offset is {first}: the {q_len} rows must lie among the {kv_len} keys")
    rotary, source = Rotary.of(head_dim, kv_len, theta), torch.Generator().manual_seed(seed)
    shown, ratio = named(characters, heads), heads // kv_heads
    noise = Noise.of(source, max(head_dim, value_dim), device)
    q = _empty(batch, heads, q_len, head_dim, strided, device, dtype)
    k = _empty(batch, kv_heads, kv_len, head_dim, strided, device, dtype)
    v = _empty(batch, kv_heads, kv_len, value_dim, strided, device, dtype)
    for row, group in ((row, group) for row in range(batch) for group in range(kv_heads)):
        mine = slice(group * ratio, (group + 1) * ratio)
        content, readings = mix(source, shown[mine], rotary, kv_len)
        content, readings = content.to(device), [one.to(device) for one in readings]
        for at in range(0, kv_len, CHUNK):
            end = min(at + CHUNK, kv_len)
            blur = KEY_NOISE * noise(end - at, head_dim)
            blur[: max(0, 1 - at)] = 0.0  # on one key that holds so much, noise would not average out
            k[row, group, at:end] = rotate(content.keys(at, end) + blur, rotary.angles(at, end, device))
            v[row, group, at:end] = noise(end - at, value_dim)
        for at in range(first, first + q_len, CHUNK):
            end = min(at + CHUNK, first + q_len)
            angles = rotary.angles(at, end, device)
            for head, reading in enumerate(readings, group * ratio):
                queries = reading.queries(content, at, end) + QUERY_NOISE * noise(end - at, head_dim)
                q[row, head, at - first : end - first] = rotate(queries, angles)
    return q, k, v


def _empty(
    batch: int, heads: int, tokens: int, width: int, strided: bool, device: torch.device | str, dtype: torch.dtype
) -> Tensor:
    if strided:
        return torch.empty(batch, tokens, heads, width, device=device, dtype=dtype).transpose(1, 2)
    return torch.empty(batch, heads, tokens, width, device=device, dtype=dtype)
