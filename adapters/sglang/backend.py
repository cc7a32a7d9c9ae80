"""Prefill for SGLang: one of its own attention backends, whose `forward_extend` runs requests sparse where it can.

Everything else stays as it is there, decoding and CUDA graphs among it.
"""

# SGLang is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Tensor

from sparseprefill.errors import AttachError
from sparseprefill.pages import Pages

from ..serving.attend import decline, run
from ..serving.layer import Layer
from ..serving.parts import Part
from ..session.prospects import NOT_CHOSEN
from .hooks import REQUESTS, missing
from .layer import layer_of, objection
from .options import given
from .pages import pages_of, scale_of
from .plan import Step, plan
from .runtime import Runtime, make_runtime
from .start import check_host

log = logging.getLogger(__name__)


@define(eq=False)
class State:
    """A backend's state beside its host's own.

    another: makes the host's backend again, for the requests beside those that run sparse; it is made when the first
    of them come. step: of the batch that is being computed.
    """

    runtime: Runtime
    runner: Any
    another: Callable[[], Any]
    step: Step | None = field(default=None, init=False)
    rest: Any = field(default=None, init=False)
    layers: dict[int, Layer] = field(factory=dict, init=False)

    def layer(self, layer: Any, extra: dict[str, Any]) -> Layer:
        """A layer's wish for a call with these further arguments."""
        found, sinks = self.layers.get(layer.layer_id), extra.get("sinks")
        if found is None or found.sinks is not sinks:
            found = layer_of(layer, self.runner.token_to_kv_pool)
            found = self.layers[layer.layer_id] = evolve(found, sinks=sinks)
        why = None if found.reason else objection(extra)
        return found if why is None else evolve(found, reason=why)


def prefilling(host: Any) -> Any:
    """A subclass of a backend's class, for an object of it to become one of. host: the class."""

    class Sparse(host):
        """The host's, but for prefill.

        Its kernels read the block table of the requests for as long as they run, so SGLang's scheduler must not write
        there until the whole step is over.
        """

        sparse: State
        use_captured_forward_metadata_for_breakable_cuda_graph = False

        def init_forward_metadata(self, forward_batch: Any) -> None:
            """Answer SGLang once a step, ahead of its layers."""
            super().init_forward_metadata(forward_batch)
            state = self.sparse
            pool = state.runner.req_to_token_pool.req_to_token
            state.step = plan(state.runtime, forward_batch, pool, int(state.runner.page_size))
            if state.step is not None and state.step.rest is not None:
                if state.rest is None:
                    state.rest = state.another()
                state.rest.init_forward_metadata(state.step.rest.batch)

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
            """Prepare a graph's part of a step, which is the host's."""
            self.sparse.step = None
            super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

        def shared_read_ends(self, fm: Any) -> Any:
            """Event after which SGLang's scheduler may write where a step reads."""
            from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

            return SharedReadEnds.UNKNOWN if fm.is_extend() else super().shared_read_ends(fm)

        def _snapshot_prefill_shared_reads(self, forward_batch: Any, *, num_qo_tokens: int) -> Any:
            return self.shared_read_ends(forward_batch.forward_mode)

        def forward_extend(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
            **kwargs: Any,
        ) -> Any:
            """Attention of a batch with prompts, ``[tokens, Hq * D]``. Writes the new keys and values into the pool."""
            step, dense = self.sparse.step, super().forward_extend
            if step is None:
                return dense(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
            state, facts = self.sparse, self.sparse.layer(layer, kwargs)
            chosen = state.runtime.options.layers
            if facts.reason is not None or (chosen is not None and facts.index not in chosen):
                for part in step.parts:
                    decline(state.runtime, facts, part, facts.reason or NOT_CHOSEN)
                return dense(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
            if save_kv_cache and k is not None:
                _write(state.runner, layer, forward_batch, k, v)
            query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
            output = query.new_empty(query.shape)
            whole: list[Tensor] = []

            def stock(part: Part, rows: Tensor, out: Tensor) -> None:
                if not whole:
                    found = dense(q, k, v, layer, forward_batch, False, **kwargs)
                    whole.append(found.view(output.shape))
                out.copy_(whole[0][part.begin : part.end])

            pool, of = state.runner.token_to_kv_pool, layer.layer_id
            k_all, v_all = pool.get_key_buffer(of), pool.get_value_buffer(of)
            scales = (scale_of(layer, "k_scale", k_all.device), scale_of(layer, "v_scale", k_all.device))
            read = _reader(state, step, k_all, v_all, scales, q.dtype)
            own = (x for x in (*scales, facts.sinks) if x is not None)
            slots = (query, output, k_all, v_all, *step.tables.values(), *own)
            run(state.runtime, facts, step.parts, query, output, slots, read, stock, slow=True)
            if step.rest is not None:
                rows = step.rest.rows
                if whole:
                    rows.put_tokens(rows.take_tokens(whole[0]), output)
                else:
                    some = (None if x is None else rows.take_tokens(x) for x in (q, k, v))
                    found = state.rest.forward_extend(*some, layer, step.rest.batch, False, **kwargs)
                    rows.put_tokens(found.view(-1, *output.shape[1:]), output)
            output[step.tokens :].zero_()
            if facts.index == state.runtime.last:
                for name in step.complete:
                    state.runtime.requests.end(name)
            return output.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    return Sparse


def make(runner: Any) -> Any:
    """SGLang's factory of the backend ``sparseprefill``; what wrong options raise ends the server's start."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    options, name = given(), runner.decode_attention_backend_str
    check_host(name)

    def another() -> Any:
        return ATTENTION_BACKENDS[name](runner)

    for hook in missing():
        owner, _, method = hook.target.rpartition(".")
        said = f"{hook.without}: SGLang did not apply the hook on {owner.rpartition('.')[2]}.{method}"
        if hook is REQUESTS:
            raise AttachError(said)
        log.warning("sparseprefill: %s", said)
    if runner.is_draft_worker:
        log.info("sparseprefill: what a draft model computes is %s's alone", name)
        return another()
    runtime = make_runtime(runner, options, name)
    host = another()
    host.__class__ = prefilling(type(host))
    host.sparse = State(runtime, runner, another)
    return host


def _write(runner: Any, layer: Any, batch: Any, k: Tensor, v: Tensor) -> None:
    """Keys and values of a step's tokens into the pool, as SGLang's own backends do."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    if layer.k_scale is None:
        runner.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(batch), k, v)
    else:  # the pool divides in place, and they are needed again
        given = k.clone(), v.clone(), layer.k_scale, layer.v_scale
        runner.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(batch), *given)


def _reader(
    state: State, step: Step, k: Tensor, v: Tensor, scales: tuple[Tensor | None, Tensor | None], dtype: torch.dtype
) -> Callable[[Part], Pages]:
    """The function that tells where the keys of a part's request stand. k, v, scales: the layer's."""
    page, copies = int(state.runner.page_size), state.runtime.options.copies

    def read(part: Part) -> Pages:
        length = 0 if part.row is None else part.row.end
        table = step.tables[part.first]
        return pages_of(k, v, table, length, page=page, dtype=dtype, scales=scales, copies=copies)

    return read
