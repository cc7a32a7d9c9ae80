"""The calls that the contract checks use when none are given: few, small, and each with a reason to be there."""

from __future__ import annotations

from typing import Any

import torch

from sparseprefill.call import AttentionCall
from sparseprefill.testing.inputs import tensors


def standard_calls(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[AttentionCall, ...]:
    """Lengths around a tile edge, GQA, offsets, padding, structure, strides, window, softcap, sinks, scale, other head
    dimensions, and prompts of a known length."""

    def make(kind: str, heads: int, kv_heads: int, q_len: int, kv_len: int, batch: int = 1, **fields: Any) -> Any:
        dim, value_dim = fields.pop("dims", (64, 64))
        sizes: dict[str, Any] = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": dim}
        place: dict[str, Any] = {"strided": fields.pop("strided", False), "device": device, "dtype": dtype}
        seed, offset = q_len + 7 * kv_len, fields.get("q_offset")
        q, k, v = tensors(kind, **sizes, q_len=q_len, kv_len=kv_len, q_offset=offset, seed=seed, **place)
        return AttentionCall(q, k, v[..., :value_dim], **fields)

    def rows(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return (
        make("random", 2, 2, 129, 129),
        make("stripes", 4, 1, 211, 211, strided=True),
        make("sink", 2, 1, 70, 197),
        make("local", 2, 1, 64, 160, q_offset=32),
        make("random", 1, 1, 1, 1),
        make("random", 2, 1, 1, 127),
        make("sink", 2, 1, 140, 140, batch=2, starts=rows(0, 53)),
        make("random", 2, 1, 129, 129, batch=2, lengths=rows(129, 31)),
        make("stripes", 2, 2, 97, 97, batch=2, window=24),
        make("random", 2, 1, 97, 97, softcap=2.0),
        make("local", 2, 1, 113, 113, sinks=torch.tensor([1.0, -2.0], dtype=torch.float32, device=device)),
        make("stripes", 3, 1, 20, 70, batch=3, dims=(40, 24), starts=rows(0, 64, 30), scale=0.3, layer=2),
        make("sink", 4, 2, 24, 90, batch=2, q_offset=60, scale=0.05, prompt_lengths=rows(130, 70)),
    )


def half_call(device: torch.device | str) -> AttentionCall:
    """One call in bfloat16."""
    sizes: dict[str, Any] = {"batch": 1, "heads": 4, "kv_heads": 2, "q_len": 50, "kv_len": 70, "head_dim": 32}
    return AttentionCall(*tensors("sink", **sizes, device=device, dtype=torch.bfloat16))


def chunked_call(grain: int, device: torch.device | str, dtype: torch.dtype) -> AttentionCall:
    """One call long enough to be cut twice at `grain`."""
    length = 2 * grain + 7
    sizes: dict[str, Any] = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": length, "kv_len": length, "head_dim": 64}
    return AttentionCall(*tensors("stripes", **sizes, device=device, dtype=dtype))


def describe(call: AttentionCall) -> str:
    """Shape and features of a call, for messages."""
    keys = [call.q.shape[0], call.kv_heads, call.kv_len, call.q.shape[3]]
    values = f", v {[*keys[:3], call.value_dim]}" if call.value_dim != call.q.shape[3] else ""
    named = f"k {keys}{values}" if values else f"k/v {keys}"
    parts = [f"q {list(call.q.shape)}, {named}, {str(call.q.dtype).removeprefix('torch.')}"]
    names = ("scale", "q_offset", "starts", "lengths", "prompt_lengths", "window", "softcap", "sinks")
    parts += [
        f"{name} {value.tolist() if isinstance(value, torch.Tensor) else value}"
        for name in names
        if (value := getattr(call, name)) is not None
    ]
    parts += [f"layer {call.layer}"] if call.layer else []
    return ", ".join(parts)
