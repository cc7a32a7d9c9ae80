"""Options of `generate` where every rank has to take the same steps, and the way in which ranks keep in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from sparseprefill.errors import ParameterError, printed
from sparseprefill.validate import WIDEST, is_whole

from ..huggingface.inspection import CACHE
from .fingerprint import fingerprint
from .ranks import RankError, Ranks

OURS = ("input_ids", "inputs", "attention_mask", *CACHE, "position_ids", "inputs_embeds")
"""Arguments of `generate` that a context gives itself."""

_CACHE = "it crops or copies the cache, which is spread over the ranks"
_TWICE = "it runs the model more than once for a token, and all of its keys would be taken for the answer's"
_CLOCK = "each rank would stop by its own clock, and max_new_tokens bounds an answer on all alike"
REFUSED: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "num_beam_groups"), (1, _CACHE)),
    **dict.fromkeys(("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens"), (None, _CACHE)),
    **dict.fromkeys(("prefill_chunk_size", "cache_implementation", "penalty_alpha"), (None, _CACHE)),
    **dict.fromkeys(("constraints", "force_words_ids"), (None, _CACHE)),
    "use_mtp": (False, _CACHE),
    "use_cache": (True, "the keys of the context are kept on the ranks, and are not computed again"),
    "guidance_scale": (1, _TWICE),
    "token_healing": (False, _TWICE),
    **dict.fromkeys(("negative_prompt_ids", "negative_prompt_attention_mask", "dola_layers"), (None, _TWICE)),
    "custom_generate": (None, "a context knows the model's own generate() alone"),
    "max_time": (None, _CLOCK),
    "return_dict_in_generate": (False, "generate() of a context returns token ids alone"),
    "output_attentions": (False, "attention that is spread over ranks has no weights to show"),
}
"""Settings of `generate` that cannot run over ranks: the value that may stand there besides None, and why no other."""
COUNTS = ("num_beams", "num_return_sequences")
"""Those for which `generate` takes no None."""


def check_options(options: Mapping[str, Any], config: Any) -> None:
    """ParameterError for what cannot run over ranks. config: the model's own GenerationConfig."""
    mine = sorted(set(OURS) & set(options))
    if mine:
        raise ParameterError(f"{', '.join(mine)}: a context gives these itself; pass the tokens of the questions")
    given = options.get("generation_config")
    if given is not None and not isinstance(given, GenerationConfig):
        raise ParameterError(f"generation_config is {printed(given)}: pass a GenerationConfig of transformers")
    settled = settings(options, config)
    for name, (fine, why) in REFUSED.items():
        value = settled.get(name)
        if value is None:
            fits = name not in COUNTS or name not in options
        else:
            fits = isinstance(value, int | float) and value == fine
        if not fits:
            place, remedy = _place(name, fine, options)
            raise ParameterError(f"{name} is {printed(value)}{place}: {why}; {remedy}")
    for name in ("logits_processor", "stopping_criteria"):
        if not isinstance(settled.get(name), list | tuple | None):
            raise ParameterError(f"{name} is {printed(settled[name])}: pass a list of them")
    if any(isinstance(one, MaxTimeCriteria) for one in settled.get("stopping_criteria") or ()):
        raise ParameterError(f"stopping_criteria holds a MaxTimeCriteria: {_CLOCK}; leave it out")
    if settled.get("stop_strings") is not None and settled.get("tokenizer") is None:
        place, _ = _place("stop_strings", None, options)
        raise ParameterError(f"stop_strings is {printed(settled['stop_strings'])}{place}: pass the tokenizer as well")
    stops(options, config)


def check_names(options: Mapping[str, Any], model: Any) -> None:
    """ParameterError for values that transformers refuses, such as 0 new tokens, and for unknown names."""
    known = {*signature(model.generate).parameters, "tokenizer"}
    check = getattr(model, "_validate_model_kwargs", None)
    try:
        left = GenerationConfig().update(**options)
        if check is not None:
            check({name: value for name, value in left.items() if name not in known})
    except (TypeError, ValueError) as error:
        raise ParameterError(f"options of generate(): {error}") from error


def settings(options: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """All that `generate` goes by: an option counts before the given generation_config, that before the model's own."""
    return {**_held(options, config), **options}


def _held(options: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The generation_config's values, and for those that are None the model's."""
    given = options.get("generation_config")
    mine = {} if given is None else {name: x for name, x in given.to_dict().items() if x is not None}
    return {**config.to_dict(), **mine}


def _place(name: str, fine: Any, options: Mapping[str, Any]) -> tuple[str, str]:
    """Behind a setting's value: where it stands, and what to do."""
    if name in options:
        return "", "leave it out" if options[name] is not None else f"pass {fine} or leave it out"
    if getattr(options.get("generation_config"), name, None) is not None:
        return " in generation_config", f"set it to {fine} there"
    return " in the model's own generation_config", f"pass {name}={fine}, or set model.generation_config.{name} to it"


def stops(options: Mapping[str, Any], config: Any) -> frozenset[int]:
    """Tokens that end an answer. config: the model's own GenerationConfig. ParameterError where they are no tokens."""
    found = settings(options, config).get("eos_token_id")
    if found is None or any(type(one) is EosTokenCriteria for one in options.get("stopping_criteria") or ()):
        return frozenset()  # such a criterion stands in the place of generate's own
    listed = found.flatten().tolist() if isinstance(found, Tensor) else found
    try:
        return frozenset(map(int, listed if isinstance(listed, list | tuple) else [listed]))
    except (TypeError, ValueError) as error:
        raise ParameterError(f"eos_token_id is {printed(found)}: pass a token id, or a list of them") from error


def shown(options: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The options as ranks compare them, with what they leave to the model. A streamer may be one rank's alone."""
    given = {name: value for name, value in options.items() if name != "streamer"}
    held = _held(options, config).items()
    plain = {name: value for name, value in held if name[:1] != "_" and name != "transformers_version"}
    return fingerprint("options", {**given, "generation_config": plain})


def check_seed(seed: Any) -> None:
    """ParameterError for what `torch.manual_seed` does not take."""
    if not is_whole(seed, -WIDEST, 2 * WIDEST - 1):
        raise ParameterError(f"seed is {printed(seed)}: pass an integer of 64 bits")


class Ends(StoppingCriteria):  # type: ignore[misc,unused-ignore]
    """The ends of rows by criteria other than end tokens: by those of rank 0, on every rank.

    `generate` says only when all rows have ended, and goes on with the others until then.
    """

    def __init__(self, ranks: Ranks, criteria: Sequence[Any]) -> None:
        self.ranks = ranks
        self.criteria: Any = StoppingCriteriaList(criteria)
        self._at: Tensor | None = None

    @classmethod
    def among(cls, ranks: Ranks, options: Mapping[str, Any], config: Any) -> tuple[Ends, list[Any]]:
        """The ends by what the options and the model's config hold; and the criteria for `generate` to take instead.

        A criterion of transformers stands in the place of the one that `generate` makes of a setting, so that it gets
        to see these as well.
        """
        given: list[Any] = [*(options.get("stopping_criteria") or ())]
        replacing = [one for one in given if type(one) in (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)]
        strings = settings(options, config).get("stop_strings")
        if strings is not None and not any(type(one) is StopStringCriteria for one in given):
            given.append(StopStringCriteria(stop_strings=strings, tokenizer=options["tokenizer"]))
        ends = cls(ranks, given)
        return ends, [*replacing, ends] if given else []

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, scores: Any, **kwargs: Any
    ) -> Tensor:
        """bool ``[B]``: rows that end here. input_ids: ``[B, N]`` with all tokens so far."""
        done: Tensor = self.criteria(input_ids, scores, **kwargs).to(torch.uint8).contiguous()
        if self.ranks.size > 1:
            self.ranks.wait(self.ranks.broadcast(done), done)
        columns = input_ids.shape[1]
        before = torch.full_like(done, 0, dtype=torch.int64) if self._at is None else self._at
        self._at = torch.where((before == 0) & (done != 0), columns, before)
        return done != 0

    def counts(self, rows: Sequence[Sequence[int]], first: int, stops: frozenset[int]) -> list[int]:
        """Of each row's new tokens, how many belong to the answer. first: columns before them. Waits for the device."""
        found = [0] * len(rows) if self._at is None else self._at.tolist()
        return [
            min(
                at - first if at else len(row),
                next((place + 1 for place, token in enumerate(row) if token in stops), len(row)),
            )
            for at, row in zip(found, rows, strict=True)
        ]


class SameScores(LogitsProcessor):  # type: ignore[misc,unused-ignore]
    """Every rank goes by the scores of rank 0, so that a last bit never parts their ways.

    NaN of any rank is in the merged attention of all, and so in these scores: a RankError, the same on every rank. It
    comes with the next token, since by then nobody waits for the scores of this one. step: called once a token.
    """

    def __init__(self, ranks: Ranks, step: Callable[[], None]) -> None:
        self.ranks, self._step, self._last = ranks, step, torch.zeros((), dtype=torch.float32, device="cpu")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The scores of rank 0; float32 ``[B, vocabulary]``."""
        self.check()
        self._step()
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
