"""The calls that the contract checks use when none are given: few, small, and each with a reason to be there."""

from __future__ import annotations

from typing import Any

import torch

from sparseprefill.call import AttentionCall
from sparseprefill.testing.inputs import tensors


def standard_calls(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[AttentionCall, ...]:
    """Lengths around a tile edge, GQA, offsets, padding, structure, strides, window, softcap and sinks."""

    def make(kind: str, heads: int, kv_heads: int, q_len: int, kv_len: int, batch: int = 1, **fields: Any) -> Any:
        sizes: dict[str, Any] = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": 64}
        place: dict[str, Any] = {"strided": fields.pop("strided", False), "device": device, "dtype": dtype}
        seed, offset = q_len + 7 * kv_len, fields.get("q_offset")
        made = tensors(kind, **sizes, q_len=q_len, kv_len=kv_len, q_offset=offset, seed=seed, **place)
        return AttentionCall(*made, **fields)

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
    )


def chunked_call(grain: int, device: torch.device | str, dtype: torch.dtype) -> AttentionCall:
    """One call long enough to be cut twice at `grain`."""
    length = 2 * grain + 7
    sizes: dict[str, Any] = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": length, "kv_len": length, "head_dim": 64}
    return AttentionCall(*tensors("stripes", **sizes, device=device, dtype=dtype))


def describe(call: AttentionCall) -> str:
    """Shape and features of a call, for messages."""
    keys = [call.q.shape[0], call.kv_heads, call.kv_len, call.q.shape[3]]
    parts = [f"q {list(call.q.shape)}, k/v {keys}, {str(call.q.dtype).removeprefix('torch.')}"]
    parts += [
        f"{name} {value.tolist() if isinstance(value, torch.Tensor) else value}"
        for name in ("q_offset", "starts", "lengths", "window", "softcap", "sinks")
        if (value := getattr(call, name)) is not None
    ]
    return ", ".join(parts)
