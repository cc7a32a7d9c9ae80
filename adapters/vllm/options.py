"""The options in vLLM's ``additional_config``, and whether the engine does as they say."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from sparseprefill.config import KEYS
from sparseprefill.errors import AttachError, ParameterError
from sparseprefill.route import Route

from ..serving.options import OWN, TABLE, Options, read_table
from ..serving.wishes import mistyped

SCHEDULER = "sparseprefill.adapters.vllm.scheduler.fixed_chunks"
CHUNKLESS = f"{TABLE}.chunk is missing: {SCHEDULER} needs the tokens of a chunk"
OURS = frozenset((*OWN, "config", "profiles", *KEYS))
"""Keys of our table, where they are missed at the top of vLLM's."""


def parse(additional: object) -> Options:
    """Checked before the engine serves anything; ParameterError names the key at fault."""
    given = additional if isinstance(additional, Mapping) else {}
    why = mistyped(given, "key of --additional-config")
    if why is not None:
        raise ParameterError(why)
    if given.get(TABLE) is not None:
        return read_table(given[TABLE])
    ours = [key for key in given if key in OURS]
    if ours:
        raise ParameterError(
            f"--additional-config has {', '.join(ours)} at its top, where vLLM's plugins share a table: put what is "
            f'for {TABLE} into one of its own, {{"{TABLE}": {{"{ours[0]}": ...}}}}'
        )
    example = '--additional-config \'{"sparseprefill": {"method": "rowmax"}}\''
    raise ParameterError(f"the backend CUSTOM is selected, but no method: add {example}")


def check_chunk(config: Any, options: Options) -> None:
    """AttachError where chunks of one size are asked for, and another scheduler would cut prompts as it likes, or the
    other way round; ParameterError where a step has no room for such a chunk.

    config: the VllmConfig. The scheduler is made behind the loading of the weights, and asks again.
    """
    given = getattr(getattr(config, "scheduler_config", None), "scheduler_cls", None)
    name = given if given is None or isinstance(given, str) else f"{given.__module__}.{given.__qualname__}"
    if options.chunk is None:
        if name == SCHEDULER:
            raise ParameterError(CHUNKLESS)
        return
    if name == SCHEDULER:
        limits = config.scheduler_config
        tokens = getattr(limits, "max_num_scheduled_tokens", None) or getattr(limits, "max_num_batched_tokens", None)
        if tokens is not None:
            check_room(options.chunk, int(tokens), int(limits.max_num_seqs), drafted(config))
    else:
        shown = "vLLM's own scheduler" if name is None else name
        raise AttachError(
            f"{TABLE}.chunk is {options.chunk}, but {shown} cuts prompts by what else is in the batch: "
            f"add --scheduler-cls {SCHEDULER}"
        )


def check_room(chunk: int, tokens: int, requests: int, drafts: int) -> None:
    """ParameterError where a step of so many tokens has no room for a chunk beside one token of each other request.

    drafts: further tokens of each of them.
    """
    room = tokens - (requests - 1) * (1 + drafts)
    if chunk > room:
        raise ParameterError(
            f"{TABLE}.chunk is {chunk}: beside {requests} requests (--max-num-seqs) a step of {tokens} tokens "
            f"(--max-num-batched-tokens) has room for {room}; pass a smaller chunk, fewer requests or more tokens"
        )


def drafted(config: Any) -> int:
    """Tokens that a decoding request may have in a step beyond one: those of a speculator."""
    speculative = getattr(config, "speculative_config", None)
    slots = int(getattr(speculative, "max_num_new_slots_for_drafting", 0) or 0)
    return slots + int(getattr(config, "num_speculative_tokens", 0) or 0)


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
    """End of the chunk of a prompt that begins at token `start`, if the step has room up to `end`: at the next multiple
    of `chunk`, or with the prompt. `start` itself where there is too little room: then it waits for a step that has it.
    Behind the prompt there are no bounds."""
    if start >= prompt:
        return end
    bound = min((start // chunk + 1) * chunk, prompt)
    return bound if end >= bound else start


def check_unread(config: Any, options: Options) -> None:
    """AttachError where `skip_unread` is on and rows of the last layer would be missed. config: the VllmConfig.

    Which requests want the log probabilities of their prompts is seen at each (`Names.ends_alone`).
    """
    if options.skip_unread:
        _refuse_unread(_objection(config, options))


def check_last(config: Any, options: Options, last: int, able: Container[int]) -> None:
    """AttachError where `skip_unread` is on and no row could be left out.

    last: index of the model's last layer. able: the layers of this process that run sparse.
    """
    pipelined = int(config.parallel_config.pipeline_parallel_size) > 1  # one of its processes has the layer
    if options.skip_unread and last not in able and not pipelined:
        _refuse_unread(f"layer {last}, the model's last, cannot run sparse here")


def _refuse_unread(why: str | None) -> None:
    if why is not None:
        raise AttachError(f"{TABLE}.skip_unread is true, but {why}: leave skip_unread out")


def _objection(config: Any, options: Options) -> str | None:
    model = config.model_config
    quantised = getattr(model, "quantization", None)
    if not options.tail:
        return "tail is 0, so a prompt's last row need not see every key"
    if getattr(config, "speculative_config", None) is not None:
        return "drafts are made from all rows (--speculative-config)"
    if getattr(model, "runner_type", "generate") != "generate":
        return "a pooling model reads all rows"
    if getattr(getattr(config, "aux_output_config", None), "enabled", False):
        return "the experts of all rows are asked for (--enable-return-routed-experts)"
    if quantised is not None:
        return f"the model is quantised ({quantised}), so the rows of a step may share a scale"
    return None
