"""Options of `generate` where every rank has to take the same steps, and the way in which ranks keep in step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from sparseprefill.errors import ParameterError

from ..huggingface.inspection import CACHE
from .fingerprint import fingerprint
from .ranks import RankError, Ranks

OURS = ("input_ids", "inputs", "attention_mask", *CACHE, "position_ids", "inputs_embeds", "use_cache")
"""Arguments of `generate` that a context gives itself."""

ONE = ("num_beams", "num_return_sequences")
NONE = ("assistant_model", "prompt_lookup_num_tokens", "prefill_chunk_size", "cache_implementation", "penalty_alpha")


def check_options(options: Mapping[str, Any], config: Any) -> None:
    """ParameterError for what cannot run over ranks. config: the GenerationConfig behind the options."""
    mine = sorted(set(OURS) & set(options))
    if mine:
        raise ParameterError(f"{', '.join(mine)}: a context gives these itself; pass the tokens of the questions")
    if options.get("return_dict_in_generate"):
        raise ParameterError("return_dict_in_generate: generate() of a context returns token ids alone; leave it out")
    for name in (*ONE, *NONE):
        value = options.get(name, getattr(config, name, None))
        if value not in ((None, 1) if name in ONE else (None,)):
            raise ParameterError(
                f"{name} is {value!r}: it crops or copies the cache, which is spread over the ranks; leave it out"
            )


def stops(options: Mapping[str, Any], config: Any) -> frozenset[int]:
    """Tokens that end an answer."""
    found = options.get("eos_token_id", getattr(config, "eos_token_id", None))
    if found is None:
        return frozenset()
    return frozenset(map(int, found if isinstance(found, list | tuple) else [found]))


def shown(options: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The options as ranks compare them, with what they leave to the model. A streamer may be one rank's alone."""
    given = {name: value for name, value in options.items() if name != "streamer"}
    held = config.to_dict().items()
    plain = {name: value for name, value in held if name[:1] != "_" and name != "transformers_version"}
    return fingerprint("options", {**given, "generation_config": plain})


class SameScores(LogitsProcessor):  # type: ignore[misc,unused-ignore]
    """Every rank goes by the scores of rank 0, so that a last bit never parts their ways.

    NaN of any rank is in the merged attention of all, and so in these scores: a RankError, the same on every rank. It
    comes with the next token, since by then nobody waits for the scores of this one.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self._last = ranks, torch.zeros((), dtype=torch.float32, device="cpu")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The scores of rank 0; float32 ``[B, vocabulary]``."""
        self.check()
        scores = scores.contiguous()
        if self.ranks.size > 1:
            self.ranks.wait(self.ranks.broadcast(scores), scores)
        self._last = scores.amax()
        # Until the error is raised a draw from NaN must not end the CUDA context.
        return torch.nan_to_num(scores, nan=0.0, posinf=torch.inf, neginf=-torch.inf)

    def check(self) -> None:
        """RankError where the last scores hold NaN. Waits for the device."""
        check_scores(self.ranks, self._last)


def check_scores(ranks: Ranks, scores: Tensor) -> None:
    """RankError where scores of the next token, the same on every rank, hold NaN (host sync)."""
    if bool(torch.isnan(scores).any()):
        raise RankError(ranks.tell("the scores of the next token hold NaN: some rank's keys or weights are not finite"))


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers from `seed` inside the block, on the CPU and the device; the generators are left as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
