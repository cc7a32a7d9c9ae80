"""Star: a model made ready on every rank; Context: what the ranks hold together, and the questions about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict, define, field
from torch import Tensor

from sparseprefill.config import from_config
from sparseprefill.errors import ParameterError
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.executors.dense import dense
from sparseprefill.pipeline import Pipeline
from sparseprefill.registry import default_registry
from sparseprefill.route import Route

from ..huggingface.identity import identity
from .answer import Answer, columns, counting_cache
from .attention import Switch
from .encode import Inner, encode
from .executor import AnchoredBlockExecutor
from .fingerprint import fingerprint
from .inspection import decoder_of, fit_inside, probe, vocabulary_of
from .layout import Layout, Sizes
from .options import Ends, SameScores, check_names, check_options, check_scores, check_seed, seeded, shown, stops
from .ranks import TIMEOUT, Ranks, check_timeout, is_timeout
from .tokens import Rows, digest, rows_of
from .watch import Watch


class Star:
    """Star Attention of one model over the ranks of a process group. Every rank makes one, and the same calls on it.

    model: a causal language model of transformers, in evaluation mode, with the same weights on every rank.
    block_size, anchor_length, tile: as of the method `star-attention`, in tokens; the result is that of the method.
    inner: a method that runs inside each block in phase 1: a name, a table as of `from_config`, or a Pipeline; None for
    dense attention. group: None for the default group. timeout: seconds that a rank waits for the others in one place.

    Raises AttachError where torch.distributed does not run or the model cannot be spread, ParameterError for wrong
    sizes, timeout or inner method, RankError where the ranks were given different things, or another one was refused
    what it was given. The model is its own again between calls.
    """

    def __init__(
        self,
        model: Any,
        *,
        block_size: int | None = None,
        anchor_length: int | None = None,
        tile: int = 128,
        inner: str | Mapping[str, Any] | Pipeline | Route | None = None,
        group: dist.ProcessGroup | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self.model, self.ranks = model, Ranks(group, timeout if is_timeout(timeout) else TIMEOUT)
        self.sizes = Sizes(block_size, anchor_length, tile)
        pipeline = self.ranks.agree("start", lambda: self._read(inner, timeout))
        with self.ranks.run("the trial run"):
            seen = probe(model, self.switch)
        pipeline = self.ranks.agree("inner", lambda: (fit_inside(pipeline, seen.calls, self.sizes), {}))
        self.layers = seen.layers
        self.executor = AnchoredBlockExecutor(AutoExecutor(), self.ranks)
        self.inner = attention_of(pipeline)
        config = model.generation_config
        self.fill = next((x for x in (config.pad_token_id, config.bos_token_id) if isinstance(x, int)), 0)
        self._watch = Watch.of(self.ranks, self.switch.decoder.device)

    def _read(self, inner: Any, timeout: float) -> tuple[Pipeline | Route | None, dict[str, Any]]:
        """Check what this rank was given; the inner method, and all of it as ranks compare it."""
        check_timeout(timeout)
        default_registry().get("star-attention").configure(asdict(self.sizes))
        self.switch = Switch(decoder_of(self.model))
        self.vocabulary = vocabulary_of(self.switch.decoder)
        pipeline = _inner(inner, self.switch.decoder)
        said = {"sizes": str(self.sizes), **fingerprint("inner", pipeline), "timeout": timeout}
        return pipeline, {**said, **_facts(self.switch.decoder)}

    def encode(self, contexts: Rows) -> Context:
        """Phase 1: every rank computes its blocks, and keeps their keys.

        contexts: token ids of each batch row, without padding; lengths may differ. Raises ParameterError for what are
        no token ids of the model, RankError where a rank fails or was given other contexts.
        """

        def read() -> tuple[list[list[int]], dict[str, Any]]:
            rows = rows_of("contexts", contexts, self.vocabulary)
            return rows, {"contexts": digest(rows)}

        rows = self.ranks.agree("encode", read)
        layouts = tuple(self.sizes.layout(len(row), self.ranks.size) for row in rows)
        with self.ranks.run("phase 1"):
            shards = encode(self.switch, self.ranks, self.layers, self.inner, rows, layouts)
            self.ranks.gather(
                torch.zeros(1, dtype=torch.float32, device=self.switch.decoder.device)
            ).cpu()  # until all are done
        owner = self.ranks.rank == self.ranks.size - 1
        return Context(self, rows, layouts, Answer(self.executor, shards, owner))


@define(eq=False)
class Context:
    """Contexts whose phase 1 is done: one for each batch row. Made by `Star.encode`; every rank makes the same calls.

    tokens: of each row, all that is known: context, questions, answers. Each `generate` is a turn that goes on where
    the last one ended, until `rewind`.
    """

    star: Star
    tokens: list[list[int]]
    layouts: tuple[Layout, ...]
    phase: Answer
    _done: list[int] = field(init=False)
    _context: tuple[int, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._done = [layout.context for layout in self.layouts]
        self._context = tuple(map(len, self.tokens))

    @property
    def held(self) -> tuple[int, ...]:
        """Context tokens of each batch row whose keys this rank holds."""
        return tuple(layout.held(self.star.ranks.rank) for layout in self.layouts)

    def generate(self, questions: Rows, *, seed: int = 0, **options: Any) -> list[list[int]]:
        """The model's answers, by its own `generate` on every rank.

        questions: token ids of each batch row, at least one each. seed: of sampling, the same on every rank.
        options: of `generate`, such as max_new_tokens, do_sample, temperature, eos_token_id, streamer.
        Returns each row's new tokens, up to where it ended: by an end token, stop_strings or stopping_criteria, all of
        rank 0. Raises ParameterError for what cannot run over ranks, RankError where a rank fails, stalls, was asked
        something else, or computes what is not finite.
        """
        star, model = self.star, self.star.model
        config = model.generation_config

        def read() -> tuple[list[list[int]], dict[str, Any]]:
            check_options(options, config)
            check_names(options, model)
            check_seed(seed)
            asked, said = self._read(questions)
            return asked, {**said, "seed": seed, **shown(options, config)}

        asked = star.ranks.agree("generate", read)
        with star.ranks.run("phase 2"):
            ids, mask, past = self._next(asked)
            same, (ends, criteria) = SameScores(star.ranks, self.phase.step), Ends.among(star.ranks, options, config)
            given = {**options, "stopping_criteria": criteria}
            given["logits_processor"] = [*(options.get("logits_processor") or ()), same]
            with star.switch.to(self.phase), seeded(seed, ids.device):
                out = model.generate(
                    ids,
                    attention_mask=mask,
                    past_key_values=counting_cache(list(star.layers), past),
                    **given,
                )
            same.check()
            rows = out[:, ids.shape[1] :].tolist()
            return self._answered(rows, ends.counts(rows, ids.shape[1], stops(options, config)))

    @torch.no_grad()
    def logits(self, questions: Rows) -> Tensor:
        """Read questions and return the logits ``[B, Q, vocabulary]`` of their tokens, aligned at the end."""
        star = self.star
        asked = star.ranks.agree("logits", lambda: self._read(questions))
        with star.ranks.run("phase 2"):
            ids, mask, past = self._next(asked)
            places = (mask.cumsum(-1) - 1).clamp_min(0)
            with star.switch.to(self.phase):
                out: Tensor = star.model(
                    input_ids=ids[:, past:],
                    position_ids=places[:, past:],
                    past_key_values=counting_cache(list(star.layers), past),
                    logits_to_keep=max(map(len, asked)),
                ).logits
            check_scores(star.ranks, out)
            self._done = list(map(len, self.tokens))
            return out

    def rewind(self) -> None:
        """Forget all questions and answers: the next question is the first."""
        self.tokens = [row[:count] for row, count in zip(self.tokens, self._context, strict=True)]
        self._done = [layout.context for layout in self.layouts]
        self.phase.tails.clear()

    def _read(self, questions: Rows) -> tuple[list[list[int]], dict[str, Any]]:
        """Check the questions; their rows, and what ranks compare of them."""
        asked = rows_of("questions", questions, self.star.vocabulary)
        if len(asked) != len(self.tokens):
            raise ParameterError(f"questions: {len(asked)} rows for {len(self.tokens)} contexts; pass one for each")
        return asked, {"questions": digest(asked), "before": digest(self.tokens)}

    def _next(self, asked: Sequence[list[int]]) -> tuple[Tensor, Tensor, int]:
        """Take the questions in: ids and mask of all tokens on the device, and columns that are done."""
        device = next(self.star.switch.decoder.parameters()).device
        self.tokens = [before + new for before, new in zip(self.tokens, asked, strict=True)]
        real = [len(row) - count for row, count in zip(self.tokens, self._done, strict=True)]
        self.phase.expect(list(self.star.layers), real)
        ids, mask, past = columns(self.tokens, self._done, self.star.fill)
        return ids.to(device), mask.to(device), past

    def _answered(self, rows: list[list[int]], counts: Sequence[int]) -> list[list[int]]:
        """Note the answers, the first `counts[b]` tokens of each row. The last of all is not computed yet, and what
        stands behind a row's end is forgotten."""
        answers = [row[:end] for row, end in zip(rows, counts, strict=True)]
        for number, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            self.tokens[number] += answer
            self._done[number] = len(self.tokens[number]) - (len(answer) == len(row))
        self.phase.keep([done - layout.context for done, layout in zip(self._done, self.layouts, strict=True)])
        return answers


def _inner(given: str | Mapping[str, Any] | Pipeline | Route | None, decoder: Any) -> Pipeline | Route | None:
    if given is None:
        if decoder.device.type != "cuda":
            return None
        given = "dense"  # through the executor: torch's own kernels are slower where queries follow other keys
    if isinstance(given, Pipeline | Route):
        made: Pipeline | Route = given
    elif isinstance(given, str | Mapping):
        made = from_config({"method": given} if isinstance(given, str) else given, at="inner")
    else:
        raise ParameterError(f"inner is {given!r}: pass the name of a method, a table as of from_config, or a Pipeline")
    made.check_model(identity(decoder))
    return made


def attention_of(pipeline: Pipeline | Route | None) -> Inner:
    """The attention inside a block: a method, or for None torch's own dense attention; on this rank alone."""
    if pipeline is None:
        return lambda call, memory: dense(call, AutoExecutor()).out
    return lambda call, memory: pipeline.run(call, memory).out


def _facts(decoder: Any) -> dict[str, Any]:
    """Facts that tell two models apart, in a moment: sizes, type, and a few weights of every part."""
    known = identity(decoder)
    seen = [_local(x).flatten()[:16].double().sum().item() for _, x in sorted(decoder.named_parameters())]
    weights = f"{sum((place + 1) * x for place, x in enumerate(seen)):.9g}"
    return {"model": f"{known.architecture} {known.digest}", "dtype": str(decoder.dtype), "weights": weights}


def _local(x: Any) -> torch.Tensor:
    """This rank's part of a weight that tensor parallelism has cut."""
    found: torch.Tensor = x.detach() if getattr(x, "to_local", None) is None else x.detach().to_local()
    return found
