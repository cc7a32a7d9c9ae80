"""Whether vLLM reads of a prompt no more of the last layer than the last row (`skip_unread`)."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from sparseprefill.errors import AttachError

from ..serving.options import TABLE, Options


def check_unread(config: Any, options: Options, last: int, able: Container[int]) -> None:
    """AttachError where `skip_unread` is on and rows of the last layer would be missed, or none could be left out.

    config: the VllmConfig. last: index of the model's last layer. able: the layers of this process that run sparse.
    Which requests want the log probabilities of their prompts is seen at each (`Names.ends_alone`).
    """
    if options.skip_unread and (why := _objection(config, options, last, able)):
        raise AttachError(f"{TABLE}.skip_unread is true, but {why}: leave skip_unread out")


def _objection(config: Any, options: Options, last: int, able: Container[int]) -> str | None:
    model, pipelined = config.model_config, int(config.parallel_config.pipeline_parallel_size) > 1
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
    if last not in able and not pipelined:  # of a pipeline's processes one has it
        return f"layer {last}, the model's last, cannot run sparse here"
    return None
