"""Options of `generate` over ranks: where answers end, and what is refused before anything is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sparseprefill.adapters.star import Context, RankError, Star
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList

from distributed import fault_jobs, jobs, world
from distributed.models import NEW, alone, build, tokens
from sparseprefill.errors import ParameterError

pytestmark = pytest.mark.usefixtures("group")

GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}

UNUSED, OTHER = 2, 96
"""Tokens that no answer holds, and that the answer of row 2 begins with."""


class Ending:
    """A criterion that ends row `row` at `columns` columns. It counts its calls."""

    def __init__(self, row: int, columns: int) -> None:
        self.row, self.columns, self.calls = row, columns, 0

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.calls += 1
        ends = torch.zeros(len(input_ids), dtype=torch.bool)
        ends[self.row] = input_ids.shape[1] == self.columns
        return ends


def context_of(model: Any) -> Context:
    return Star(model, timeout=fault_jobs.LONG, **jobs.BATCH).encode(jobs.ROWS)


def by_own(model: Any, end: int) -> dict[str, Any]:
    model.generation_config.eos_token_id = end
    return GREEDY


def by_own_beside_a_given(model: Any, end: int) -> dict[str, Any]:
    model.generation_config.eos_token_id = [end]
    return {"generation_config": GenerationConfig(**GREEDY)}


def by_given(model: Any, end: int) -> dict[str, Any]:
    model.generation_config.eos_token_id = OTHER
    return {"generation_config": GenerationConfig(**GREEDY, eos_token_id=end)}


def by_tensor(model: Any, end: int) -> dict[str, Any]:
    return {**GREEDY, "eos_token_id": torch.tensor([end, UNUSED])}


def by_criterion_of_transformers(model: Any, end: int) -> dict[str, Any]:
    model.generation_config.eos_token_id = OTHER  # in whose place the criterion stands
    return {**GREEDY, "stopping_criteria": [EosTokenCriteria(end)]}


@pytest.mark.parametrize("how", [by_own, by_own_beside_a_given, by_given, by_tensor, by_criterion_of_transformers])
def test_an_answer_ends_with_the_end_token_wherever_that_is_set(how: Any) -> None:
    model = build()
    whole = context_of(model).generate(jobs.ASKED[0], **GREEDY)
    end = whole[1][1]
    wanted = [row[: row.index(end) + 1] if end in row else row for row in whole]
    check_turns(model, context_of(model), how(model, end), wanted)


def check_turns(model: Any, context: Context, options: dict[str, Any], wanted: list[list[int]]) -> None:
    """The answers; and a second turn of row 1 as one device has it behind them."""
    assert wanted == context.generate(jobs.ASKED[0], **options)
    known = [[*row, *asked, *new] for row, asked, new in zip(jobs.ROWS, jobs.ASKED[0], wanted, strict=True)]
    assert known == context.tokens
    model.generation_config.eos_token_id = None
    second = context.generate(jobs.ASKED[1], **GREEDY)
    sizes = {**jobs.BATCH, "context_length": len(jobs.ROWS[1])}
    ((_, answer),) = alone(model, known[1], (jobs.ASKED[1][1],), **sizes)
    assert answer == second[1]


@pytest.mark.parametrize("with_end_token", [False, True], ids=["tokens follow", "padding follows"])
def test_a_row_ends_where_a_criterion_ends_it(with_end_token: bool) -> None:
    model = build()
    whole = context_of(model).generate(jobs.ASKED[0], **GREEDY)
    columns = len(jobs.ROWS[0]) // 16 * 16 + max(len(row) % 16 + len(asked) for row, asked in rows()) + 2
    criterion = Ending(1, columns)
    options = {**GREEDY, "stopping_criteria": StoppingCriteriaList([criterion])}
    if with_end_token:
        options |= {"eos_token_id": UNUSED, "pad_token_id": 0}
        assert all(UNUSED not in row for row in whole)
    check_turns(model, context_of(model), options, [whole[0], whole[1][:2], whole[2]])
    assert criterion.calls == NEW  # once a token


def rows() -> Any:
    return zip(jobs.ROWS, jobs.ASKED[0], strict=True)


def test_a_criterion_of_length_stands_in_the_place_of_generates_own() -> None:
    model = build()
    whole = context_of(model).generate(jobs.ASKED[0], **GREEDY)
    columns = len(jobs.ROWS[0]) // 16 * 16 + max(len(row) % 16 + len(asked) for row, asked in rows()) + NEW
    longer: dict[str, Any] = {
        "max_new_tokens": 1,
        "do_sample": False,
        "stopping_criteria": [MaxLengthCriteria(columns)],
    }
    assert whole == context_of(model).generate(jobs.ASKED[0], **longer)


def test_stop_strings_end_a_row() -> None:
    from sparseprefill.adapters.demo.model import load_tokenizer

    tokenizer = load_tokenizer()
    model = build(vocab_size=len(tokenizer))
    whole = context_of(model).generate(jobs.ASKED[0], **GREEDY)
    text = tokenizer.decode(whole[1][:2])
    wanted = [row[:2] if tokenizer.decode(row[:2]) == text else row for row in whole]
    assert len(wanted[0]) == NEW
    check_turns(model, context_of(model), {**GREEDY, "stop_strings": [text], "tokenizer": tokenizer}, wanted)


BEAMS = "num_beams is 2 in the model's own generation_config: it crops .* pass num_beams=1, or set model.generation_"
OWN: dict[str, tuple[Any, str]] = {
    "num_beams": (2, BEAMS),
    "prompt_lookup_num_tokens": (3, "pass prompt_lookup_num_tokens=None, or"),
    "cache_implementation": (
        "static",
        "is 'static' in the model's own .* pass cache_implementation=None",
    ),
    "return_dict_in_generate": (True, "token ids alone; pass return_dict_in_generate=False, or"),
    "use_cache": (False, "not computed again; pass use_cache=True, or"),
    "guidance_scale": (1.5, "pass guidance_scale=1, or"),
    "max_time": (2.0, "max_new_tokens bounds .* pass max_time=None, or"),
    "output_attentions": (True, "no weights to show"),
    "token_healing": (True, "more than once for a token"),
    "stop_strings": (["a"], "in the model's own generation_config: pass the tokenizer as well"),
}


def test_refusals_see_the_models_own_generation_config_and_their_remedies_hold() -> None:
    model = build()
    context = context_of(model)
    whole = context.generate(jobs.ASKED[0], **GREEDY)
    for name, (value, said) in OWN.items():
        setattr(model.generation_config, name, value)
        beside: dict[str, Any] = {"generation_config": GenerationConfig(**GREEDY)}
        for options in (GREEDY, beside):
            with pytest.raises(ParameterError, match=said):
                context.generate(jobs.ASKED[0], **options)
        if name not in ("output_attentions", "stop_strings"):
            context.rewind()
            fine = 1 if name in ("num_beams", "guidance_scale") else True if name == "use_cache" else None
            assert whole == context.generate(jobs.ASKED[0], **{**GREEDY, name: fine})
        setattr(model.generation_config, name, None)
    context.rewind()
    assert whole == context.generate(jobs.ASKED[0], **GREEDY)  # the group goes on


GIVEN: tuple[tuple[dict[str, Any], str], ...] = (
    ({"guidance_scale": 3.0}, "guidance_scale is 3.0: it runs the model more than once for a token, .*; leave it out"),
    ({"negative_prompt_ids": torch.tensor([[3, 4]])}, "negative_prompt_ids is a Tensor of torch.int64"),
    ({"max_time": 1.0}, "max_time is 1.0: each rank would stop by its own clock, and max_new_tokens .*; leave it out"),
    ({"stopping_criteria": [MaxTimeCriteria(1.0)]}, "stopping_criteria holds a MaxTimeCriteria: .* max_new_tokens"),
    ({"stopping_criteria": Ending(0, 3)}, "stopping_criteria is .*: pass a list"),
    (
        {"generation_config": GenerationConfig(num_beams=3)},
        "3 in generation_config: .*; set it to 1 there",
    ),
    ({"generation_config": {"num_beams": 3}}, "generation_config is {'num_beams': 3}: pass a GenerationConfig"),
    ({"num_beams": None}, "num_beams is None: .*; pass 1 or leave it out"),
    ({"use_cache": False}, "use_cache is False"),
    ({"custom_generate": "someone/else"}, "custom_generate is 'someone/else'"),
    ({"dola_layers": "low"}, "dola_layers is 'low'"),
    ({"stop_strings": "x"}, "stop_strings is 'x': pass the tokenizer as well"),
    ({"eos_token_id": "x"}, "eos_token_id is 'x': pass a token id"),
    ({"max_new_tokens": 0}, r"options of generate\(\): .*max_new_tokens"),
    ({"max_tokens": 3}, r"options of generate\(\): .*max_tokens"),
    ({"seed": 1.5}, "seed is 1.5: pass an integer"),
)


def test_options_that_cannot_run_over_ranks_are_refused_before_anything_is_computed() -> None:
    context = Star(build(), block_size=32, tile=16).encode([tokens(70)])
    for options, said in GIVEN:
        with pytest.raises(ParameterError, match=said):
            context.generate([tokens(3)], **{"max_new_tokens": 3, **options})
    (answer,) = context.generate([tokens(3)], max_new_tokens=3, guidance_scale=1.0, use_cache=True)
    assert len(answer) == 3


@pytest.mark.parametrize("who", ["logits_processor", "stopping_criteria"])
def test_a_second_run_of_the_model_in_one_step_is_an_error(who: str) -> None:
    model = build()
    context = Star(model, block_size=32, tile=16).encode([tokens(70)])

    def calls(input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        model(input_ids[:, -3:])
        return scores if who == "logits_processor" else torch.zeros(1, dtype=torch.bool)

    with pytest.raises(RankError, match=r"layer 0: it runs a second time for one token, .* let it call another one"):
        context.generate([tokens(3)], **{**GREEDY, who: [calls]})


@pytest.mark.parametrize("token", [97, -1])
def test_tokens_that_the_model_does_not_embed_are_refused(token: int) -> None:
    star = Star(build(), block_size=32, tile=16)
    with pytest.raises(ParameterError, match=f"contexts: token id {token} in row 1: .* 0 to 96; pass ids of"):
        star.encode([tokens(70), [1, token, 2]])
    context = star.encode([tokens(70)])
    for asks in (context.generate, context.logits):
        with pytest.raises(ParameterError, match=f"questions: token id {token} in row 0"):
            asks([[3, token]])


def test_an_inner_method_that_refuses_every_block_is_refused_with_the_star() -> None:
    small: dict[str, Any] = {"block_size": 32, "tile": 16}
    for sizes in (small, {}):
        with pytest.raises(ParameterError, match="inner is kascade: Kascade: no table of anchor layers"):
            Star(build(), inner="kascade", **sizes)
    for timeout in ("x", True, float("nan"), None):
        with pytest.raises(ParameterError, match=r"timeout is .*: pass a positive number of seconds"):
            Star(build(), timeout=timeout)  # type: ignore[arg-type,unused-ignore]


REFUSED = {
    "block_size": ("start", "ParameterError: block_size is -1"),
    "timeout": ("start", "ParameterError: timeout is 'x'"),
    "training": ("start", "AttachError: LlamaModel is in training mode"),
    "inner": ("start", "UnknownMethodError: "),
    "contexts": ("encode", "ParameterError: contexts: pass at least one row"),
    "questions": ("generate", "ParameterError: questions: pass at least one row"),
    "num_beams": ("generate", "ParameterError: num_beams is 2: it crops"),
    "logits": ("logits", "ParameterError: questions: token id 500"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_one_rank_is_refused_all_report_at_once(what: str) -> None:
    call, error = REFUSED[what]
    right, wrong = world.shared(2).run(fault_jobs.refuses, what)
    assert right.value.startswith(f"RankError: {call}: rank 1 refuses its arguments: {error}"), right
    assert wrong.value.startswith(error), wrong
    assert max(right.seconds, wrong.seconds) < fault_jobs.LONG / 2


def test_what_all_ranks_are_refused_alike_leaves_the_group_as_it_was() -> None:
    for outcome in world.shared(2).run(fault_jobs.refuses, "all"):
        assert outcome.value.startswith("ParameterError: num_beams is 2, then an answer of 3"), outcome


def test_rows_end_by_the_criteria_of_the_first_rank() -> None:
    assert [outcome.value for outcome in world.shared(2).run(fault_jobs.stops)] == [[2, 1]] * 2
