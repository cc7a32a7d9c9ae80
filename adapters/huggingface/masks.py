"""The compact mask: who may see whom, one integer a key instead of a query x key matrix.

Transformers builds its mask once per forward and hands it to every layer as a tensor. A causal or sliding mask with
padding is fully told by one code a key: 0 an unused slot of a static cache, 1 padding, 2 or more a real key. The
dtypes (uint8 for causal, int32 for sliding, whose codes hold the window) are none that an attention kernel accepts,
so a compact mask that went astray fails loudly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

CAUSAL, SLIDING = torch.uint8, torch.int32
PADDING, REAL = 1, 2
MaskFunction = Callable[..., Any]


@frozen
class Pattern:
    """Causal attention, within `window` keys if there is one."""

    window: int | None = None


@frozen(eq=False)
class Compact:
    """A decoded compact mask.

    used: slots of the cache in use, the first ones of the key tensor. starts, lengths: int32 ``[B]`` as in
    AttentionCall, None without padding. holes: some row's real keys are not contiguous. real: bool ``[B, used]``.
    """

    used: int
    window: int | None
    starts: Tensor | None
    lengths: Tensor | None
    holes: bool
    real: Tensor


def classify(mask_function: MaskFunction, local_size: int | None, allow_is_causal_skip: bool) -> Pattern | None:
    """The pattern of a mask function of transformers; None for any other.

    Chunked and sliding masks arrive alike, as a closure and a size, so the closure is tried on a few pairs. Masks
    with an overlay (packed sequences, image blocks) arrive with `allow_is_causal_skip` off.
    """
    if not allow_is_causal_skip:
        return None
    if local_size is None:
        return Pattern() if mask_function is causal_mask_function else None
    window, zero = int(local_size), torch.zeros((), dtype=torch.long)
    query = torch.tensor([0, 1, window - 1, window, window + 1, 2 * window - 1, 2 * window, 3 * window + 1])[:, None]
    distance = torch.tensor([-window, -1, 0, 1, window // 2, window - 1, window, window + 1, 2 * window])[None]
    wanted = ((distance >= 0) & (distance < window)).expand(query.shape[0], -1)
    try:
        same = torch.equal(mask_function(zero, zero, query, query - distance).expand_as(wanted), wanted)
    except Exception:  # a closure over tensors of the batch or of another device: not a plain window
        return None
    return Pattern(window) if same else None


def encode(
    pattern: Pattern,
    batch: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    padding: Tensor | None,
    device: torch.device | str,
) -> Tensor:
    """``[B, 1, 1, Nkv]``: the compact mask. padding: bool ``[B, n]`` over absolute positions, or None."""
    code, dtype = (REAL, CAUSAL) if pattern.window is None else (pattern.window + 1, SLIDING)
    if padding is None and (length := used_slots(q_length, kv_length, q_offset, kv_offset)) is not None:
        mask = torch.full((batch, 1, 1, kv_length), code, dtype=dtype, device=device)
        if length < kv_length:
            mask[..., length:] = 0
        return mask
    position = torch.arange(kv_length, device=device) + kv_offset
    used = (position < q_offset + q_length)[None].expand(batch, -1)
    real = used
    if padding is not None:
        padding = functional.pad(padding, (0, max(0, kv_length + kv_offset - padding.shape[-1])))
        real = used & padding[:, position]
    return (used.to(dtype) * PADDING + real.to(dtype) * (code - PADDING))[:, None, None, :].contiguous()


def used_slots(q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int) -> int | None:
    """How many slots of the cache are in use, the first ones; None where only the device knows, or others are."""
    return min(kv_length, q_offset + q_length) if kv_offset == 0 and isinstance(q_offset, int) else None


def plain(
    pattern: Pattern,
    batch: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    device: torch.device | str,
) -> Compact | None:
    """What `decode` reads from a mask without padding, known without reading it; None where the device has to tell."""
    used = used_slots(q_length, kv_length, q_offset, kv_offset)
    if used is None:
        return None
    return Compact(used, pattern.window, None, None, False, torch.ones(batch, used, dtype=torch.bool, device=device))


def is_compact(mask: object) -> bool:
    """Whether a layer's mask is ours; a user's ``[B, 1, 1, Nkv]`` mask has another dtype."""
    return (
        isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1:3] == (1, 1) and mask.dtype in (CAUSAL, SLIDING)
    )


def decode(mask: Tensor) -> Compact:
    """Read a compact mask back, with one host sync."""
    code = mask[:, 0, 0]
    real = code >= REAL
    count = real.sum(-1)
    first = real.to(torch.uint8).argmax(-1)
    behind = code.shape[-1] - real.flip(-1).to(torch.uint8).argmax(-1)
    holes = ((count > 0) & (behind - first != count)).any()
    used = (code[0] > 0).sum()
    padded = (count != used).any()
    n, split, ragged, top = torch.stack([used, holes.long(), padded.long(), code.max().long()]).tolist()
    window = None if mask.dtype == CAUSAL else max(top - 1, 1)
    starts, lengths = (first.to(torch.int32), count.to(torch.int32)) if ragged else (None, None)
    return Compact(n, window, starts, lengths, bool(split), real[:, :n])


def rebuild(compact: Compact, make: MaskFunction, q_length: int, dtype: torch.dtype, config: Any) -> Any:
    """The mask that the host's own implementation needs for the `used` first keys, made by its mask function."""
    batch, device = compact.real.shape[0], compact.real.device
    local: dict[str, Any] = {"mask_function": causal_mask_function}
    if compact.window is not None:
        mask_function = sliding_window_causal_mask_function(compact.window)
        local = {"mask_function": mask_function, "local_size": compact.window}
    return make(
        batch_size=batch,
        q_length=q_length,
        kv_length=compact.used,
        q_offset=compact.used - q_length,
        kv_offset=0,
        attention_mask=None if compact.lengths is None else compact.real,
        allow_is_causal_skip=True,
        dtype=dtype,
        config=config,
        use_vmap=False,
        device=device,
        **local,
    )
