"""The state of one of SGLang's model runners: options, sessions, requests, and what the report is asked for."""

# SGLang is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from sparseprefill.errors import AttachError
from sparseprefill.pages import Pages

from ..serving import runtime
from ..serving.layer import LATENT, Layer, dense_reason, example
from ..serving.model import model_of
from ..serving.options import Options
from ..serving.summary import show
from ..serving.tally import Owner
from ..serving.warm import Sizes, warm_engine
from ..serving.wishes import SWITCH
from ..serving.written import STORE, Unwritten, Written
from . import known
from .layer import heads_of, layer_of
from .pages import pages_of
from .stores import outside
from .texts import Texts, together

LEAST = 1 << 12
"""Pages that are remembered of the smallest pool."""
log = logging.getLogger(__name__)
_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


@define(eq=False)
class Runtime(runtime.Runtime):
    """coming: ids of the step's prefills. last: index of the last layer that this process runs sparse. layers: of this
    process."""

    coming: frozenset[str] = field(default=frozenset(), init=False)
    last: int = field(default=-1, init=False)
    layers: int = field(default=0, init=False)

    def alive(self, name: str) -> bool:
        """True if SGLang still has a request of this id whose last chunk is yet to come."""
        request = known.find(name)
        return request is not None and (name in self.coming or not (request.finished() or known.complete(request)))

    def forget(self, rid: str) -> None:
        """The request of this id is gone."""
        self.requests.end(rid)
        if isinstance(self.written, Texts):
            self.written.forget(rid)


def answer(result: Any, *args: object, **kwargs: object) -> None:
    """After SGLang's ``Scheduler.get_internal_state``, which ``GET /server_info`` and `Engine.get_server_info()` show:
    adds ``sparseprefill``, a report for each model runner, and how many prefills are in progress (host sync: densities
    that wait are counted)."""
    found = [{**one.answer(), "in_progress": len(one.requests)} for one in list(_runtimes)]
    if found:
        result.internal_state[SWITCH] = found


def make_runtime(runner: Any, options: Options, host: str) -> Runtime:
    """State that a ModelRunner's layers share. host: name of SGLang's attention for the rest.

    Raises what wrong options raise, and AttachError for a model that nothing here can serve.
    """
    show(options.log_level)
    _check_attention(runner)
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = [one for one in runner.model.modules() if isinstance(one, RadixAttention)]
    made = Runtime.made(options, _model(runner, layers, host), _owner(runner))
    made.start()
    _runtimes.add(made)
    known.tell(made)
    made.layers, made.requests.chunk = len(layers), _step(runner)
    made.written = written_of(runner)
    able = _survey(made, runner, layers)
    made.last = max((one.index for one in able), default=-1)
    if able and (options.warm_up if options.warm_up is not None else not runner.server_args.skip_server_warmup):
        _warm(made, runner, layers[0], able)
    return made


def written_of(runner: Any) -> Written:
    """Memory of the radix cache: twice the tokens of the pool, as a host's memory may hold more."""
    flag, tokens = outside(runner.server_args), int(getattr(runner, "max_total_num_tokens", None) or 0)
    if flag:
        return Unwritten(STORE.format(name=flag))
    page = int(getattr(runner, "page_size", None) or 1)
    return Texts(known.find, max(2 * tokens // together(page), LEAST), page)


def check_model(runner: Any, options: Options, host: str) -> None:
    """Raises what wrong options raise, whatever the model is, and what `make_runtime` would raise of its configuration;
    its layers need not be there."""
    for source in options.sources:
        source.build()
    _check_attention(runner)
    Runtime.made(options, _model(runner, (), host), _owner(runner))


def _check_attention(runner: Any) -> None:
    if runner.use_mla_backend:
        raise AttachError(f"{LATENT}: use one of SGLang's for {runner.model_config.model_path}")


def _survey(made: Runtime, runner: Any, layers: Sequence[Any]) -> list[Layer]:
    """The layers that can run sparse; what will not is said, or refused, before the server serves anything."""
    pool, chosen = runner.token_to_kv_pool, made.options.layers
    found = [layer_of(one, pool) for one in layers]
    reasons = [
        dense_reason(
            made.session.route,
            facts,
            heads_of(one, made.model.first_head),
            runner.dtype,
            torch.device(runner.device),
            keys=int(runner.model_config.context_len),
            min_query=made.options.min_query,
            step=_step(runner),
            bound="chunked_prefill_size",
        )
        for facts, one in zip(found, layers, strict=True)
    ]
    made.expect([(facts.index, why) for facts, why in zip(found, reasons, strict=True)])
    pairs = [(facts, one) for facts, one, why in zip(found, layers, reasons, strict=True) if why is None]
    able = [(facts, one) for facts, one in pairs if chosen is None or facts.index in chosen]
    if able:
        (facts, layer), longest = able[0], int(runner.model_config.context_len)
        heads, device = heads_of(layer, made.model.first_head), torch.device(runner.device)
        call = example(facts, heads, runner.dtype, device, keys=longest)
        made.foretell(call, longest, "chunked_prefill_size")
    return [facts for facts, _ in able]


def _step(runner: Any) -> int:
    """Tokens of the longest chunk of a prompt that one step computes."""
    longest, chunk = int(runner.model_config.context_len), int(runner.server_args.chunked_prefill_size or 0)
    return min(longest, chunk) if chunk > 0 else longest


def _model(runner: Any, layers: Sequence[Any], host: str) -> Any:
    config = runner.model_config
    names = getattr(config.hf_config, "architectures", None)
    given = (config.hf_text_config, names, str(config.model_path), host)
    if not layers:
        return model_of(*given)
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.attn_tp_size == 1:
        return model_of(*given)
    heads = int(layers[0].tp_q_head_num), int(layers[0].tp_k_head_num)
    return model_of(*given, heads=heads, rank=int(parallel.attn_tp_rank))


def _owner(runner: Any) -> Owner:
    args = runner.server_args
    name = getattr(args, "served_model_name", None) or args.model_path
    return Owner(str(name), worker=str(getattr(runner, "gpu_id", 0)))


def _warm(made: Runtime, runner: Any, layer: Any, able: Sequence[Layer]) -> None:
    pool, page = runner.token_to_kv_pool, int(runner.page_size)
    stored = pool.get_key_buffer(able[0].index).dtype
    size, device = int(layer.qk_head_dim), torch.device(runner.device)
    one = torch.ones(1, dtype=torch.float32, device=device) if stored.itemsize == 1 else None

    def pages(cache: Tensor, table: Tensor, keys: int) -> Pages:
        kv = (x.contiguous().flatten(0, 1) for x in cache.transpose(1, 2).split(size, dim=-1))
        k, v = (x.view(stored) for x in kv)
        return pages_of(k, v, table, keys, page=page, dtype=runner.dtype, scales=(one, one))

    sizes = Sizes(
        query_heads=int(layer.tp_q_head_num),
        kv_heads=int(layer.tp_k_head_num),
        head_dim=size,
        page=page,
        stored=stored,
        dtype=runner.dtype,
        outside=False,
        step=_step(runner),
        longest=int(runner.model_config.context_len),
        small=made.options.min_query if made.session.route.gate is not None else 0,
        device=device,
    )
    warm_engine(made, able, sizes, pages)
