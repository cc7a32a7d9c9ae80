"""The options, read when an engine starts: by every flag that names us, whatever its model makes of the backend.

A layer reads them as it is made. But a model may have no attention, or attention that another backend serves, and wrong
options would go on without a word. vLLM has no place where a plugin may object to an engine, so `install` goes around
the constructor of its executor: what makes the workers, which load the weights, behind every front end.
"""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from sparseprefill.errors import AttachError

from ..serving.wishes import SWITCH, mistyped
from .options import SCHEDULER, parse
from .runtime import check_options, selected, whole_model

EXTENSION = "sparseprefill.adapters.vllm.worker.ReportExtension"
HOST = "vLLM's own attention"
MARK = "sparseprefill"


def install(executor: Any) -> str | None:
    """Go around the constructor of vLLM's Executor, once; why that cannot be, or None."""
    making = vars(executor).get("__init__")
    if making is None:
        return f"this vLLM does not make an {executor.__name__} of an engine's configuration"
    if not hasattr(making, MARK):
        executor.__init__ = _checking(making)
    return None


def check(config: Any) -> None:
    """Raises what wrong options raise, where a flag names us. config: the VllmConfig.

    The report's flag needs no options, and reads those that are there. What only a loaded model decides comes later.
    """
    additional = config.additional_config if isinstance(config.additional_config, Mapping) else {}
    if not selected(config) and _path(config.scheduler_config.scheduler_cls) != SCHEDULER:
        ours = additional.get(SWITCH) is not None or mistyped(additional) is not None
        if _path(config.parallel_config.worker_extension_cls) != EXTENSION or not ours:
            return
    options = parse(config.additional_config)
    try:
        model = whole_model(config, HOST)
    except AttachError:  # it does not attend
        model = None
    check_options(config, options, model)


def _path(given: Any) -> str:
    return f"{given.__module__}.{given.__qualname__}" if callable(given) else str(given)


def _checking(making: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(making)
    def make(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        check(vllm_config)
        making(self, vllm_config, *args, **kwargs)

    setattr(make, MARK, True)
    return make
