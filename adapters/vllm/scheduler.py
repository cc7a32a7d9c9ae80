"""vLLM's scheduler, with fixed bounds for the chunks of prompts: ``--scheduler-cls ...scheduler.fixed_chunks``.

vLLM gives a prompt's chunk what a step has left, so that its bounds depend on who else is being served. What a method
selects depends on them, and whether a chunk is long enough to run sparse. Here they are multiples of ``chunk`` from the
request's first token; a chunk for which a step has no room waits for the next step.
"""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from sparseprefill.errors import AttachError, ParameterError

from ..serving.options import TABLE
from .options import CHUNKLESS, check_room, chunk_end, parse
from .plugin import excluded
from .runtime import Host, selected

log = logging.getLogger(__name__)
HOOK = "_reserve_prefill_lookahead"
"""The function that vLLM's schedulers call with every chunk before they take it."""
CACHED = (
    "chunks are fixed, but what a request finds in the prefix cache depends on those before it: "
    "--no-enable-prefix-caching makes answers independent of them"
)


class FixedChunks(Host):
    """Mixed into vLLM's schedulers, ahead of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        why = excluded() if selected(self.vllm_config) else None
        if why is not None:
            raise AttachError(why)
        chunk = parse(self.vllm_config.additional_config).chunk
        if chunk is None:
            raise ParameterError(CHUNKLESS)
        if not hasattr(super(), HOOK) or getattr(self, "num_prefill_lookahead", 0) > 1:
            raise AttachError(
                f"{TABLE}.chunk is {chunk}: this vLLM's scheduler, or its speculator, sets other chunk bounds"
            )
        self._chunk: int = chunk
        speculative = self.vllm_config.speculative_config
        drafts = int(getattr(speculative, "max_num_new_slots_for_drafting", 0) or 0)
        drafts += int(self.num_spec_tokens)
        check_room(chunk, int(self.max_num_scheduled_tokens), int(self.max_num_running_reqs), drafts)
        if self.vllm_config.cache_config.enable_prefix_caching:
            log.info("sparseprefill: %s", CACHED)

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Tokens that this step computes of a request; 0 to let it wait. Prompts with images end where vLLM says."""
        wanted = int(super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens))
        if request.has_encoder_inputs:
            return wanted
        prompt, end = int(request.num_prompt_tokens), num_computed_tokens + wanted
        return chunk_end(num_computed_tokens, end, prompt, self._chunk) - num_computed_tokens


class FixedScheduler(FixedChunks, Scheduler):
    """Scheduler of an engine that waits for each step."""


class FixedAsyncScheduler(FixedChunks, AsyncScheduler):
    """Scheduler of an engine that schedules a step while the last one runs."""


def fixed_chunks(*args: Any, **kwargs: Any) -> Any:
    """Makes the scheduler that goes with the engine's ``async_scheduling``; arguments as of vLLM's own.

    Raises ParameterError where no chunk is given, or a step has no room for it beside the other requests.
    """
    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    kind = FixedAsyncScheduler if config.scheduler_config.async_scheduling else FixedScheduler
    return kind(*args, **kwargs)
