"""A stand-in for SGLang: a pool, requests, batches, and an attention backend that computes with every key."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sparseprefill.adapters.serving.model import Model
from sparseprefill.adapters.serving.tally import Owner
from sparseprefill.adapters.sglang import known
from sparseprefill.adapters.sglang.backend import State, prefilling
from sparseprefill.adapters.sglang.options import given
from sparseprefill.adapters.sglang.runtime import Runtime
from torch import Tensor

from sparseprefill.profiles.identity import ModelIdentity

HEADS, KV_HEADS, SIZE, LAYERS = 4, 2, 16, 2
SLOTS, CONTEXT = 2048, 512


class Req:
    """A request: of `length` tokens, of which a step computes up to `end`."""

    def __init__(self, rid: str, length: int, **custom: object) -> None:
        self.rid, self.cache_salt, self.end = rid, None, length
        self.sampling_params = SimpleNamespace(custom_params=custom or None)
        self.origin_input_ids = self.full_untruncated_fill_ids = [0] * length
        self.kv = SimpleNamespace(req_pool_idx=None)
        self.extend_end = 0
        known.meet(None, self)

    def finished(self) -> bool:
        return False


class Pool:
    """As MHATokenToKVPool."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.k, self.v = (torch.randn(LAYERS, SLOTS, KV_HEADS, SIZE).to(dtype) for _ in "kv")

    def get_key_buffer(self, layer: int) -> Tensor:
        return self.k[layer]

    def get_value_buffer(self, layer: int) -> Tensor:
        return self.v[layer]

    def set_kv_buffer(self, layer: Any, loc: Tensor, k: Tensor, v: Tensor) -> None:
        for buffer, new, scale in ((self.k, k, layer.k_scale), (self.v, v, layer.v_scale)):
            buffer[layer.layer_id, loc] = (new if scale is None else new / scale).to(buffer.dtype)


class Backend:
    """SGLang's own: attention with every key, of the rows that the metadata say. seen: the batches' sizes."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.seen: list[int] = []
        self.calls = 0

    def init_forward_metadata(self, batch: Any) -> None:
        self.init_forward_metadata_out_graph(batch)

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        self.batch = batch
        self.seen.append(batch.batch_size)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Tensor:
        assert batch.batch_size == self.batch.batch_size
        self.calls += 1
        if save_kv_cache:
            self.runner.token_to_kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        rows, found = self.runner.req_to_token_pool.req_to_token, []
        starts = batch.extend_start_loc.tolist()
        for i, (first, prefix, count) in enumerate(
            zip(starts, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True)
        ):
            slots = rows[batch.req_pool_indices[i], : prefix + count].long()
            found.append(
                self._attend(q[first : first + count].view(count, HEADS, SIZE), slots, prefix, layer, **kwargs)
            )
        return torch.cat(found).flatten(1)

    def _attend(self, q: Tensor, slots: Tensor, prefix: int, layer: Any, sinks: Tensor | None = None) -> Tensor:
        pool, repeat = self.runner.token_to_kv_pool, HEADS // KV_HEADS
        k, v = (x[layer.layer_id, slots].float().repeat_interleave(repeat, 1) for x in (pool.k, pool.v))
        k, v = (x if scale is None else x * scale for x, scale in ((k, layer.k_scale), (v, layer.v_scale)))
        logits = torch.einsum("qhd,khd->hqk", q, k) * layer.scaling
        if layer.logit_cap:
            logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
        at = torch.arange(len(q))[:, None] + prefix
        seen = torch.arange(len(slots)) <= at
        if layer.sliding_window_size > -1:
            seen &= torch.arange(len(slots)) >= at - layer.sliding_window_size
        logits = logits.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            logits = torch.cat((logits, sinks.view(-1, 1, 1).expand(-1, len(q), 1)), dim=-1)
        return torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., : len(slots)], v)


def radix_layer(index: int = 0, **more: Any) -> Any:
    """As RadixAttention."""
    usual = {
        "layer_id": index, "tp_q_head_num": HEADS, "tp_k_head_num": KV_HEADS, "qk_head_dim": SIZE, "v_head_dim": SIZE,
        "scaling": SIZE**-0.5, "logit_cap": 0.0, "logit_capping_method": "tanh", "sliding_window_size": -1,
        "attn_type": SimpleNamespace(value="decoder"), "is_cross_attention": False, "use_irope": False,
        "pos_encoding_mode": "NONE", "xai_temperature_len": -1, "k_scale": None, "v_scale": None,
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **more})


def backend(table: str, page: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    """The host's backend as one of ours. table: options in JSON."""
    rows = torch.zeros(8, CONTEXT, dtype=torch.int32)
    order = torch.randperm(SLOTS // page - 1)[: 7 * CONTEXT // page // 2] + 1  # page 0 is padding
    for i, pages in enumerate(order.split(CONTEXT // page // 2)[:7]):
        rows[i + 1, : len(pages) * page] = (pages[:, None] * page + torch.arange(page)).flatten()
    runner = SimpleNamespace(
        token_to_kv_pool=Pool(dtype), req_to_token_pool=SimpleNamespace(req_to_token=rows), page_size=page
    )
    whole = ModelIdentity(
        name="m", architecture="M", layers=LAYERS, heads=HEADS, kv_heads=KV_HEADS, head_dim=SIZE, digest="d"
    )
    runtime = Runtime.made(given(table), Model(whole, whole, "M", "own", 0), Owner())
    runtime.last, runtime.layers = LAYERS - 1, LAYERS
    known.tell(runtime)
    host: Any = Backend(runner)
    host.__class__ = prefilling(Backend)
    host.sparse = State(runtime, runner, lambda: Backend(runner))
    return host


def batch(host: Any, some: Sequence[tuple[Req, int, int]], **more: Any) -> Any:
    """A ForwardBatch: of each request the tokens from, and up to, which a step computes."""
    for slot, (one, _, end) in enumerate(some):
        one.extend_end = end
        if one.kv.req_pool_idx is None:
            one.kv.req_pool_idx = slot + 1
    slots = [one.kv.req_pool_idx for one, _, _ in some]
    starts, counts = [start for _, start, _ in some], [end - start for _, start, end in some]
    rows = host.sparse.runner.req_to_token_pool.req_to_token
    loc = torch.cat([rows[slot, start:end] for slot, (_, start, end) in zip(slots, some, strict=True)]).long()
    lengths = torch.tensor(counts, dtype=torch.int32)
    ends = torch.tensor([end for _, _, end in some])
    given = {
        "forward_mode": SimpleNamespace(name="EXTEND", is_extend=lambda: True), "batch_size": len(some),
        "rids": [one.rid for one, _, _ in some], "req_pool_indices": torch.tensor(slots), "seq_lens": ends,
        "seq_lens_cpu": ends, "seq_lens_sum": int(ends.sum()), "orig_seq_lens": ends, "extend_num_tokens": sum(counts),
        "extend_prefix_lens": torch.tensor(starts, dtype=torch.int32), "extend_prefix_lens_cpu": starts,
        "extend_seq_lens": lengths, "extend_seq_lens_cpu": counts, "out_cache_loc": loc,
        "extend_start_loc": torch.cumsum(lengths, 0) - lengths, "input_ids": loc, "positions": loc,
        "reqs": [one for one, _, _ in some],
    }  # fmt: skip
    return SimpleNamespace(**{**given, **more})
