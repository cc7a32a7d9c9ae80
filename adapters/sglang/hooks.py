"""The adapter's places in SGLang, by its official hooks, and a check that SGLang has put each of them there.

SGLang applies hooks behind all plugins, and logs one that it cannot apply: the server starts without it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

from attrs import frozen

from . import doors, known, runtime, start

SRT = "sglang.srt"
BEFORE, AFTER = "BEFORE", "AFTER"


@frozen
class Hook:
    """target: SGLang's method, by its path. call: ours. kind: as SGLang names it. without: what is if it lacks."""

    target: str
    call: Callable[..., None]
    kind: str
    without: str

    @property
    def applied(self) -> bool:
        """True if SGLang's method calls ours."""
        try:
            found: Any = pkgutil.resolve_name(self.target)
        except (ImportError, AttributeError):
            return False
        while found is not None:
            if any(cell.cell_contents is self.call for cell in getattr(found, "__closure__", None) or ()):
                return True
            found = getattr(found, "__wrapped__", None)
        return False


REQUESTS = Hook(
    f"{SRT}.managers.schedule_batch.Req.__init__", known.meet, AFTER, "nobody would know what requests ask for"
)
HOOKS = (
    REQUESTS,
    Hook(
        f"{SRT}.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        known.refuse,
        BEFORE,
        "requests that ask for what is not there run dense instead of being refused",
    ),
    Hook(
        f"{SRT}.managers.tokenizer_manager.TokenizerManager.__init__",
        doors.watch,
        AFTER,
        "what requests ask for in a place where SGLang does not read it is lost without a word",
    ),
    Hook(
        f"{SRT}.managers.scheduler.Scheduler.get_internal_state",
        runtime.answer,
        AFTER,
        "/server_info has no report, and sparseprefill sglang-report finds none",
    ),
    Hook(
        f"{SRT}.model_executor.model_runner.ModelRunner.load_model",
        start.check,
        BEFORE,
        "options are checked behind the loading of the weights",
    ),
)


def missing() -> Iterator[Hook]:
    """The hooks that SGLang did not apply in this process."""
    return (hook for hook in HOOKS if not hook.applied)
