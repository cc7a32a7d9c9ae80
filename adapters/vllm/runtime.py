"""The runtimes of vLLM's engines, each found by the configuration of its engine."""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import multiprocessing
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attrs import define, field

from sparseprefill.errors import AttachError
from sparseprefill.route import Route, gated

from ..serving import runtime, stores
from ..serving.model import Model, model_of
from ..serving.options import Options
from ..serving.summary import SECONDS, show
from ..serving.tally import Owner
from .names import Names, drafting
from .options import check_chunk, check_grain, check_unread, parse
from .stores import REMEDY, unsalted

NAME = "CUSTOM"
LATENT_FLAG = f"--attention-config.mla_prefill_backend {NAME}"
"""Selects the backend for models with multi-head latent attention."""
DRAFTS = "layers of a draft model: what is drafted runs dense"
KEYLESS = "layers of type {kind}: they have no keys to choose from"
BLIND = "nobody would know which request asks for dense attention or for a profile"
INTERVAL = "VLLM_LOG_STATS_INTERVAL"
"""vLLM's own interval: the summary comes as often as its lines."""
DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
UNSEEN = (
    "the server's /metrics does not show what this process counts: set PROMETHEUS_MULTIPROC_DIR to an empty folder "
    "before it starts"
)
log = logging.getLogger(__name__)
if TYPE_CHECKING:
    Host = Any  # where types are checked, the classes of vLLM's that ours are mixed into are not there
else:
    Host = object
_runtimes: dict[int, Runtime] = {}


@define(eq=False)
class Runtime(runtime.Runtime):
    """names: of the requests of this engine's model runner."""

    names: Names = field(factory=Names.of_nobody, init=False)

    def alive(self, name: str) -> bool:
        """True if vLLM still has a request of this id, running or waiting for its next chunk."""
        return self.names.alive(name)

    def check_names(self) -> None:
        """AttachError where nobody will know what requests ask for: none of them may run sparse then."""
        why = self.names.objection()
        if why:
            raise AttachError(f"{BLIND}: {why}")

    def start(self, usual: float | None = None) -> None:
        """Begin to log the summary, by default as often as vLLM logs its own lines. usual: seconds between two."""
        super().start(interval_of_host() if usual is None else usual)
        if multiprocessing.parent_process() is not None and DIRECTORY not in os.environ:
            log.info("sparseprefill: %s", UNSEEN)


def interval_of_host() -> float:
    """Seconds between two of vLLM's own lines."""
    try:
        found = float(os.environ.get(INTERVAL, SECONDS))
    except ValueError:  # which vLLM itself refuses
        return SECONDS
    return found if found > 0 else SECONDS


def runtime_of(config: Any, attention: str, *, latent: bool = False) -> Runtime | None:
    """The runtime of an engine, made when its first layer asks; None where the backend is not selected.

    config: the VllmConfig; copies of it that vLLM makes share their compilation config. attention: name of the host's
    own attention. latent: asked for layers with multi-head latent attention. Raises what wrong options raise.
    """
    if not (_for_latent(config) if latent else _for_others(config)):
        return None
    owner = config.compilation_config
    if id(owner) not in _runtimes:
        made = _runtimes[id(owner)] = make_runtime(config, attention)
        made.start()
        weakref.finalize(owner, _runtimes.pop, id(owner), None)
    return _runtimes[id(owner)]


def layer_runtime(config: Any, attention: str, *, latent: bool = False) -> Runtime | None:
    """The runtime of a layer: None for one of a draft model, whose rows are vLLM's alone; the report notes it."""
    if not drafting():
        return runtime_of(config, attention, latent=latent)
    runtime = existing(config)
    if runtime is not None:
        runtime.leave(DRAFTS)
    return None


def existing(config: Any) -> Runtime | None:
    """The runtime of an engine, if a layer has asked for it."""
    return _runtimes.get(id(getattr(config, "compilation_config", None)))


def selected(config: Any) -> bool:
    """True if the backend is selected, for all layers or for a kind of them."""
    return _for_latent(config) or _for_others(config)


def _for_latent(config: Any) -> bool:
    chosen = getattr(config.attention_config, "mla_prefill_backend", None)  # which older versions have not
    return getattr(chosen, "name", None) == NAME


def _for_others(config: Any) -> bool:
    chosen = config.attention_config
    kinds = getattr(chosen, "backend_per_kind", None) or {}
    return any(getattr(backend, "name", None) == NAME for backend in (chosen.backend, *kinds.values()))


def make_runtime(config: Any, attention: str) -> Runtime:
    """The runtime of an engine, made anew. Raises what wrong options raise."""
    options = parse(config.additional_config)
    show(options.log_level, "vllm")
    model = _model(config, attention)
    check_chunk(config, options)
    check_unread(config, options)
    made = Runtime.made(options, model, _owner(config))
    for source, served in zip(options.sources, made.every, strict=True):
        check_grain(options.chunk, served.session.route, source.at)
    mixed = stores.warning(unsalted(config), REMEDY)
    if mixed is not None:
        log.warning("sparseprefill: %s", mixed)
    return made


def check_options(config: Any, options: Options, model: Model | None) -> None:
    """Raises what `make_runtime` would raise of them. model: all of it; None for one that does not attend."""
    check_chunk(config, options)
    check_unread(config, options)
    if model is None:
        routes = [Route.of(gated(source.build(), source.gate)) for source in options.sources]
    else:
        routes = [served.session.route for served in Runtime.made(options, model, _owner(config)).every]
    for source, route in zip(options.sources, routes, strict=True):
        check_grain(options.chunk, route, source.at)


def step_of(config: Any, options: Options) -> int:
    """Tokens of the longest chunk of a prompt that one step computes."""
    step = min(int(config.scheduler_config.max_num_batched_tokens), int(config.model_config.max_model_len))
    return step if options.chunk is None else min(step, options.chunk)


def whole_model(config: Any, attention: str) -> Model:
    """The model that an engine serves, with all of its heads. AttachError where it has none."""
    return model_of(*_given(config, attention))


def _given(config: Any, attention: str) -> tuple[Any, Sequence[str] | None, str, str]:
    model = config.model_config
    return model.hf_text_config, getattr(model.hf_config, "architectures", None), str(model.model), attention


def _model(config: Any, attention: str) -> Model:
    model, parallel = config.model_config, config.parallel_config
    if parallel.tensor_parallel_size == 1:
        return whole_model(config, attention)
    from vllm.distributed import get_tensor_model_parallel_rank

    query = int(model.get_num_attention_heads(parallel))
    # Of latent attention vLLM counts one KV head, which is the cache's; the backend sees one for each query head.
    heads = query, query if getattr(model, "use_mla", False) else int(model.get_num_kv_heads(parallel))
    rank = int(get_tensor_model_parallel_rank())
    return model_of(*_given(config, attention), heads=heads, rank=rank)


def _owner(config: Any) -> Owner:
    """Whose metrics a process counts: the model's name as vLLM's metrics have it, and the number of its worker."""
    given, parallel = getattr(config, "model_config", None), getattr(config, "parallel_config", None)
    name: Any = getattr(given, "served_model_name", None) or getattr(given, "model", "")
    rank, replica = (int(getattr(parallel, field, 0) or 0) for field in ("rank", "data_parallel_index"))
    worker = f"{replica}.{rank}" if int(getattr(parallel, "data_parallel_size", 1) or 1) > 1 else str(rank)
    return Owner(str(name if isinstance(name, str) else name[0]), worker=worker)
