"""Requests that ask for a profile: refused where they come in if there is none of that name, and kept apart.

vLLM has no place where a plugin may look at a request before it is taken, so `install` goes around the method of its
Python front end that takes them. Other front ends, such as the one in Rust, do without that method. What must hold
behind all of them, that profiles share no keys, is seen to in the engine: `keep_apart` makes what is asked for part of
the salt of its record of a request, and `bar` keeps away those that a store beside the prefix cache would mix up. A
request without ``sparseprefill`` among its extra arguments passes as it is.
"""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from sparseprefill.errors import AttachError, ParameterError

from ..serving import stores
from ..serving.wishes import SWITCH, asks, salt
from .options import parse
from .runtime import selected
from .stores import REMEDY, unsalted

METHOD, MAKER, TAKER = "process_inputs", "from_engine_core_request", "preprocess_add_request"
POOLED = f"{SWITCH} is among extra_kwargs of PoolingParams, where nobody reads it: leave it out"
MARK = "sparseprefill"


def install(processor: Any, refusal: type[Exception]) -> str | None:
    """Go around `process_inputs` of vLLM's InputProcessor, once; why that cannot be, or None.

    refusal: the error that vLLM answers a request with.
    """
    taking = getattr(processor, METHOD, None)
    if taking is None or "params" not in inspect.signature(taking).parameters:
        return f"this vLLM does not take requests through {processor.__name__}.{METHOD}"
    if not hasattr(taking, MARK):
        setattr(processor, METHOD, _checking(taking, refusal))
    return None


def keep_apart(request: Any) -> str | None:
    """Go around `from_engine_core_request` of vLLM's Request, once, so that what requests ask for becomes part of
    their cache salt; why that cannot be, or None."""
    making = getattr(inspect.getattr_static(request, MAKER, None), "__func__", None)
    if making is None:
        return f"this vLLM does not make requests by {request.__name__}.{MAKER}"
    if not hasattr(making, MARK):
        setattr(request, MAKER, classmethod(_salting(making)))
    return None


def bar(engine: Any) -> str | None:
    """Go around `preprocess_add_request` of vLLM's EngineCore, once, so that no request for a profile reaches an engine
    whose stores would mix it up with others; why that cannot be, or None."""
    taking = getattr(engine, TAKER, None)
    if taking is None:
        return f"this vLLM does not take requests through {engine.__name__}.{TAKER}"
    if not hasattr(taking, MARK):
        setattr(engine, TAKER, _barring(taking))
    return None


def check_apart(config: Any, request: Any) -> None:
    """AttachError where requests with different wishes would share blocks. request: vLLM's Request."""
    shares = config.cache_config.enable_prefix_caching or getattr(config, "kv_transfer_config", None) is not None
    if shares and not hasattr(getattr(request, MAKER, None), MARK):
        raise AttachError(
            "requests that ask for a profile or for dense attention would find keys of others in the prefix cache, as "
            f"nothing goes around {request.__name__}.{MAKER} of this vLLM: add --no-enable-prefix-caching, and leave "
            "out --kv-transfer-config"
        )


def _checking(taking: Callable[..., Any], refusal: type[Exception]) -> Callable[..., Any]:
    signature = inspect.signature(taking)

    @functools.wraps(taking)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = kwargs["params"] if "params" in kwargs else signature.bind(self, *args, **kwargs).arguments["params"]
        extra, pooled = (getattr(params, name, None) or {} for name in ("extra_args", "extra_kwargs"))
        if (extra or pooled) and selected(self.vllm_config):
            why = POOLED if asks(pooled) else _objection(self.vllm_config, extra)
            if why is not None:
                raise refusal(why)
        return taking(self, *args, **kwargs)

    setattr(process_inputs, MARK, True)
    return process_inputs


def _objection(config: Any, extra: Mapping[str, object]) -> str | None:
    return parse(config.additional_config).refusal(extra) or stores.objection(extra, unsalted(config), REMEDY)


def _barring(taking: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(taking)
    def preprocess_add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        extra = getattr(request.sampling_params, "extra_args", None)
        if extra and selected(self.vllm_config):
            why = stores.objection(extra, unsalted(self.vllm_config), REMEDY)
            if why is not None:
                raise ParameterError(why)
        return taking(self, request, *args, **kwargs)

    setattr(preprocess_add_request, MARK, True)
    return preprocess_add_request


def _salting(making: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(making)
    def from_engine_core_request(cls: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        own = request.cache_salt
        request.cache_salt = salt(getattr(request.sampling_params, "extra_args", None) or {}, own)
        try:
            return making(cls, request, *args, **kwargs)
        finally:
            request.cache_salt = own

    setattr(from_engine_core_request, MARK, True)
    return from_engine_core_request
