"""Requests that ask for a profile, where they come in: refused if there is none of that name, else kept apart.

vLLM has no place where a plugin may look at a request before it is taken, so `install` goes around the method that
takes them. A request without ``sparseprefill`` among its extra arguments passes as it is, and so do all where the
backend is not selected.
"""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from .names import SWITCH
from .options import parse
from .runtime import selected

METHOD = "process_inputs"


def install(processor: Any, refusal: type[Exception]) -> str | None:
    """Go around `process_inputs` of vLLM's InputProcessor, once; why that cannot be, or None.

    refusal: the error that vLLM answers a request with.
    """
    taking = getattr(processor, METHOD, None)
    if taking is None or "params" not in inspect.signature(taking).parameters:
        return f"this vLLM does not take requests through {processor.__name__}.{METHOD}"
    if not hasattr(taking, "sparseprefill"):
        setattr(processor, METHOD, _around(taking, refusal))
    return None


def _around(taking: Callable[..., Any], refusal: type[Exception]) -> Callable[..., Any]:
    signature = inspect.signature(taking)

    @functools.wraps(taking)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = kwargs["params"] if "params" in kwargs else signature.bind(self, *args, **kwargs).arguments["params"]
        extra = getattr(params, "extra_args", None)
        if not extra or SWITCH not in extra or not selected(self.vllm_config):
            return taking(self, *args, **kwargs)
        asked = extra[SWITCH]
        why = parse(self.vllm_config.additional_config).unknown(asked)
        if why is not None:
            raise refusal(why)
        request = taking(self, *args, **kwargs)
        # Its keys and values differ from those of the same prompt under another profile: no block may be shared.
        request.cache_salt = f"{SWITCH}={asked};{request.cache_salt or ''}"
        return request

    process_inputs.sparseprefill = True  # type: ignore[attr-defined]
    return process_inputs
