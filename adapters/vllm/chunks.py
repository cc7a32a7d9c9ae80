"""Where prompts are cut into chunks: what the options may say about it, and whether the engine will do so."""

from __future__ import annotations

from typing import Any

from sparseprefill.errors import AttachError, ParameterError
from sparseprefill.route import Route

from ..serving.options import TABLE, Options

SCHEDULER = "sparseprefill.adapters.vllm.scheduler.fixed_chunks"


def check_chunk(config: Any, options: Options) -> None:
    """AttachError where chunks of one size are asked for, and another scheduler would cut prompts as it likes."""
    if options.chunk is None:
        return
    given = config.scheduler_config.scheduler_cls
    name = given if given is None or isinstance(given, str) else f"{given.__module__}.{given.__qualname__}"
    if name != SCHEDULER:
        shown = "vLLM's own scheduler" if name is None else name
        raise AttachError(
            f"{TABLE}.chunk is {options.chunk}, but {shown} cuts prompts by what else is in the batch: "
            f"add --scheduler-cls {SCHEDULER}"
        )


def check_grain(chunk: int | None, route: Route, at: str) -> None:
    """ParameterError where chunks of one size would end between the multiples of the method's grain."""
    grain = route.method_grain
    if chunk is not None and grain is not None and chunk % grain:
        good = max(chunk // grain, 1) * grain
        raise ParameterError(
            f"{TABLE}.chunk is {chunk}: {at} ({route.name}) has a grain of {grain} tokens; pass a multiple of it, such "
            f"as {good}"
        )


def chunk_end(start: int, end: int, prompt: int, chunk: int) -> int:
    """Where the chunk of a prompt that begins at token `start` may end, if the step has room up to `end`: at the next
    multiple of `chunk`, or with the prompt. `start` itself where there is too little room: then it waits for a step
    that has it. Behind the prompt there are no bounds."""
    if start >= prompt:
        return end
    bound = min((start // chunk + 1) * chunk, prompt)
    return bound if end >= bound else start
