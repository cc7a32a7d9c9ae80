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

from sparseprefill.call import uncast
from sparseprefill.errors import ParameterError
from sparseprefill.testing.characters import named
from sparseprefill.testing.content import KEY_NOISE, QUERY_NOISE, Content, read
from sparseprefill.testing.rotary import Noise, Rotary, rotate

CHUNK = 32768


@uncast
def head_tensors(
    *,
    q_len: int,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    characters: Sequence[str] | None = None,
    seed: int = 0,
    strided: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """q ``[1, Hq, N, D]``, k and v ``[1, Hkv, N, D]`` of a prompt, up to rounding the same on all devices.

    characters: names of `CHARACTERS` for the query heads in turn; by default `LAYER`, a mix for 32 heads. strided:
    token-major storage, as projections of a model give it.

    Time, and memory beyond the result, grow linearly with the length. Raises ParameterError.
    """
    for name, value in (("kv_heads", kv_heads), ("q_len", q_len)):
        if value < 1:
            raise ParameterError(f"{name} is {value}: pass a positive integer")
    if heads < 1 or heads % kv_heads:
        raise ParameterError(f"heads is {heads}: pass a multiple of the {kv_heads} kv_heads")
    rotary, source = Rotary.of(head_dim, q_len), torch.Generator("cpu").manual_seed(seed)
    shown, ratio = named(characters, heads), heads // kv_heads
    noise = Noise.of(source, head_dim, device)

    def empty(heads: int) -> Tensor:
        if strided:
            return torch.empty(1, q_len, heads, head_dim, device=device, dtype=dtype).transpose(1, 2)
        return torch.empty(1, heads, q_len, head_dim, device=device, dtype=dtype)

    q, k, v = empty(heads), empty(kv_heads), empty(kv_heads)
    for group in range(kv_heads):
        content = Content.of(source, rotary, q_len)
        mine = shown[group * ratio : (group + 1) * ratio]
        readings = [read(source, content, one, rotary, q_len).to(device) for one in mine]
        content = content.to(device)
        spans = [(at, min(at + CHUNK, q_len)) for at in range(0, q_len, CHUNK)]
        for at, end in spans:
            blur = KEY_NOISE * noise(end - at, head_dim)
            blur[: max(0, 1 - at)] = 0.0  # on one key that holds so much, noise would not average out
            k[0, group, at:end] = rotate(content.keys(at, end) + blur, rotary.angles(at, end, device))
            v[0, group, at:end] = noise(end - at, head_dim)
        for at, end in spans:
            angles = rotary.angles(at, end, device)
            for head, reading in enumerate(readings, group * ratio):
                queries = reading.queries(content, at, end) + QUERY_NOISE * noise(end - at, head_dim)
                q[0, head, at:end] = rotate(queries, angles)
    return q, k, v
