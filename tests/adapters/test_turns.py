"""Several turns: how conversations are made and played, chunks behind a cache, and the command."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from sparseprefill.adapters.demo.exam import answered, greedy
from sparseprefill.adapters.evaluation.outcome import Contender
from sparseprefill.adapters.evaluation.prompts import Prompt, Span
from sparseprefill.adapters.evaluation.reading import Reader
from sparseprefill.adapters.evaluation.texts import built_in
from sparseprefill.adapters.huggingface import attach
from transformers import DynamicCache
from typer.testing import CliRunner, Result

import sparseprefill as sp
from helpers.hf_models import STREAMING, build, prompt
from lab.turns import agents, app, chain, lookups, requests, results
from lab.turns.agents import Dense, Shape, part
from lab.turns.talk import Played, Talk, Turn, play, woven
from lab.turns.words import Words
from sparseprefill.errors import ParameterError

from .test_cli import refused

pytestmark = pytest.mark.usefixtures("_one_tokenizer")
STOCK = Contender("stock")
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MAKERS = (lookups.talk_of, chain.talk_of, requests.talk_of)


def sparse(tail: int = 0) -> Contender:
    return Contender("streaming", sp.build("streaming", **STREAMING), {}, tail)


def ids(length: int, seed: int = 1) -> tuple[int, ...]:
    return tuple(prompt(length, seed=seed)[0].tolist())


class Tokenizer:
    """A text for tokens of which each is a number."""

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def dense_answer(model: Any, before: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What the model itself decodes behind a text that it reads anew for each token."""
    found = list(before)
    with torch.inference_mode():
        for _ in range(count):
            found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return tuple(found[len(before) :])


def test_answers_stay_in_the_cache_and_greedy_leaves_it() -> None:
    model, text, asked = build("llama"), ids(60), list(ids(5, seed=3))
    expected = list(dense_answer(model, (*text, *asked), 4))
    cache = DynamicCache(config=model.config)
    model(torch.tensor([text]), past_key_values=cache)
    for draft in (expected, [1, 2, 3, 4], [*expected[:2], 1, 1]):
        assert expected == greedy(model, cache, asked, draft)
        assert 60 == cache.get_seq_length()
    assert expected == answered(model, cache, asked, [1, *expected[1:]])
    assert 60 + 5 + 3 == cache.get_seq_length()


def test_long_drafts_are_checked_at_once_where_they_are_known_as_decoding() -> None:
    model, text, asked = build("llama"), ids(60), list(ids(20, seed=3))
    with torch.inference_mode(), attach(model, "streaming", gate=None, tail=0, **STREAMING) as handle:
        cache = DynamicCache(config=model.config)
        model(torch.tensor([text]), past_key_values=cache)
        expected = greedy(model, cache, asked, [1] * 40)
        rows: list[int] = []
        heard = model.register_forward_pre_hook(
            lambda _, given, named: rows.append(given[0].shape[1]), with_kwargs=True
        )
        with heard:
            assert expected == greedy(model, cache, asked, expected)
            assert expected == greedy(model, cache, asked, expected, handle.decoding)
    assert rows == [20, 15, 15, 9, 20, 39]


def test_a_conversation_goes_on_behind_the_right_answers() -> None:
    model, text = build("llama"), ids(60)
    first, second = ids(7, seed=3), ids(6, seed=4)
    wrong = (1, 2, 3)
    own = dense_answer(model, (*text, *first), 3)
    assert wrong != own
    then = dense_answer(model, (*text, *first, *wrong, *second), 3)
    values = [str(one[-1]) for one in (own, then)]
    turns = (Turn("a", first, wrong, values[0]), Turn("b", second, then, values[1]), Turn("b", first, wrong, "none"))
    found = play(Reader(model), Tokenizer(), "lookups", Talk("t", text, turns), STOCK)
    assert {"a": (True,), "b": (True, False)} == found.scores
    assert (60, 1.0, "") == (found.tokens, found.density, found.error)


@pytest.mark.parametrize("contender", [STOCK, sparse()], ids=["stock", "streaming"])
def test_a_forced_answer_is_right_where_decoding_would_give_it(contender: Contender) -> None:
    model, text, asked = build("llama"), ids(60), ids(3, seed=3)
    answer = dense_answer(model, (*text, *asked), 20)
    off = (*answer[:-1], answer[-1] + 1 if answer[-1] < 90 else 1)
    late, early = Turn("a", asked, off), Turn("b", asked, (off[-1], *answer[1:]))
    found = play(Reader(model), Tokenizer(), "requests", Talk("t", text, (late, late, early), forced=True), contender)
    assert not found.error
    assert ((40, 2), (20, 1)) == tuple(
        (len(found.scores[name]), len(found.scores[f"{name}, exact"])) for name in ("a", "b")
    )
    if contender is STOCK:
        assert ((*[True] * 19, False) * 2, (True, True)) == (found.scores["a"], found.scores["a, exact"])
        assert (False,) == found.scores["b, exact"]
    else:
        assert found.density < 1


def test_forced_answers_are_decoding_and_questions_are_not() -> None:
    model, text = build("llama"), ids(60)
    seen: list[int] = []
    pipeline = sp.build("streaming", **STREAMING)
    run = type(pipeline).run_into

    def noted(self: Any, call: Any, *more: Any, **others: Any) -> Any:
        seen.append(call.q.shape[2])
        return run(self, call, *more, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(pipeline), "run_into", noted)
        turn = Turn("a", ids(17, seed=3), ids(40, seed=4))
        play(Reader(model), Tokenizer(), "requests", Talk("t", text, (turn,), forced=True), sparse())
    assert {60, 17} == {60, 17, 39} & set(seen)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ParameterError("no room\nat all"), "no room"),
        (RuntimeError("no kernel\nhere"), "RuntimeError: no kernel"),
        (ValueError(), "ValueError: no message"),
    ],
)
def test_what_stops_a_contender_is_told(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape = build("llama"), Shape(40, 20, 1)
    dense = Dense.of(model, Prompt("p", ids(60), (), ()), shape)

    def broken(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(Reader, "prefill", broken)
    found = play(Reader(model), Tokenizer(), "chain", Talk("t", ids(60), ()), sparse())
    assert (words, words) == (found.error, dense.run(sparse()).error)


def test_turns_by_the_chat_template(embedded_tokenizer: Any) -> None:
    from copy import deepcopy

    tokenizer = deepcopy(embedded_tokenizer)
    assert not Words.of(tokenizer).chat
    tokenizer.chat_template = TEMPLATE
    words = Words.of(tokenizer)
    assert words.chat
    assert ["<user>", "</s><assistant>", "</s><user>"] == [
        tokenizer.decode(one) for one in (words.begin, words.answer, words.again)
    ]
    for template in ("{{ raise_exception('no') }}", "hello", "{{ messages[-1]['content'] }}"):
        tokenizer.chat_template = template
        assert not Words.of(tokenizer).chat


@pytest.mark.parametrize("make", MAKERS)
def test_a_conversation_has_as_many_tokens_as_asked_and_the_answers_stand_in_it(
    make: Any, embedded_tokenizer: Any
) -> None:
    words = Words.of(embedded_tokenizer)
    (natural,) = built_in(embedded_tokenizer, 4096, 1, kinds=("code",), copies=0, facts=0)
    assert 4096 == len(natural.ids)
    assert () == natural.inside == natural.copies
    talk = make(words, natural, 4096, 8, 0)
    assert 4096 - 200 < talk.tokens <= 4096
    text = embedded_tokenizer.decode(talk.ids)
    for turn in talk.turns:
        assert turn.value in text
        assert turn.value or embedded_tokenizer.decode(turn.answer) in text
    assert talk == make(words, natural, 4096, 8, 0)
    assert talk != make(words, natural, 4096, 8, 1)
    with pytest.raises(ParameterError, match="need more; pass"):
        make(words, natural, 512, 8, 0)


def test_columns_of_the_conversations(embedded_tokenizer: Any) -> None:
    words = Words.of(embedded_tokenizer)
    (natural,) = built_in(embedded_tokenizer, 4096, 1, kinds=("code",), copies=0, facts=0)
    asked = [one.family for one in lookups.talk_of(words, natural, 4096, 12, 0).turns]
    assert [4, 4, 4] == [asked.count(one) for one in lookups.THIRDS]
    assert ["key", "door"] * 3 == [one.family for one in chain.talk_of(words, natural, 4096, 7, 0).turns]
    many = requests.talk_of(words, natural, 4096, 24, 0)
    assert many.forced
    assert sorted([*requests.FAMILIES] * 2) == sorted(one.family for one in many.turns)
    assert len({one.prompt for one in many.turns}) == len({one.answer for one in many.turns}) == len(many.turns)


def test_each_note_is_the_one_that_is_asked_for(embedded_tokenizer: Any) -> None:
    words = Words.of(embedded_tokenizer)
    (natural,) = built_in(embedded_tokenizer, 4096, 1, kinds=("code",), copies=0, facts=0)
    talk = requests.talk_of(words, natural, 4096, 4, 0)
    for turn in talk.turns:
        lead = words.ids(embedded_tokenizer.decode(turn.prompt).rpartition("Answer:\n")[2])
        places = [i for i in range(len(talk.ids)) if talk.ids[i : i + len(lead)] == lead]
        index = max(0, requests.FAMILIES.index(turn.family) - 1)
        assert (1 if turn.family == "only" else 3) == len(places)
        first = places[index] + len(lead)
        assert turn.answer == talk.ids[first : first + requests.COUNTED]


def test_lines_are_spread_over_a_text() -> None:
    text, starts = woven(tuple(range(100)), [(-1, -1), (-2,)])
    assert [25, 77] == starts
    assert (102, 103) == (text.index(99), len(text))
    assert (24, -1, -1, 25) == text[24:28]


def test_a_chunk_counts_what_stands_in_front_of_it_too() -> None:
    passage, other = (5, 6, 7, 8), (9, 8, 7, 6)
    text = (1, *passage, 2, 3, *other, 4, *passage, *other, 1, 2)
    assert 22 == len(text)
    spans = (Span("copies", 12, 16), Span("copies", 16, 20))
    whole = Prompt("p", text, (), spans)
    assert (Span("copies", 1, 5), Span("copies", 5, 9)) == part(whole, 11, 22).copies
    assert (Span("copies", 2, 6),) == part(whole, 10, 22).copies  # the other passage ends in this chunk
    assert (Span("copies", 12, 16),) == part(whole, 0, 18).copies
    assert (Span("copies", 6, 10),) == part(evolve(whole, copies=spans[:1], inside=()), 6, 17).copies
    inside_itself = part(evolve(whole, copies=(Span("copies", 16, 20),)), 6, 22)
    assert () == inside_itself.copies
    assert text[6:18] == part(whole, 6, 17).ids


@pytest.mark.parametrize("tail", [0, 16])
def test_chunks_are_prefilled_behind_the_cache_of_those_before(tail: int) -> None:
    model, shape = build("llama"), Shape(96, 48, 2)
    text = Prompt("p", ids(shape.tokens), (), (Span("copies", 40, 44), Span("copies", 100, 104)))
    dense = Dense.of(model, text, shape)
    assert [(0, 96), (96, 144), (144, 192)] == shape.chunks
    with torch.inference_mode():
        whole = model(torch.tensor([text.ids])).logits[0]
        torch.testing.assert_close(whole, torch.cat([one[:] for one in dense.rows]), atol=1e-4, rtol=1e-4)
    assert dense.stock is dense.run(STOCK)
    assert [4, 0, 0] == [len(one.scores["copies"]) for one in dense.stock.chunks]
    all_kept = dense.run(Contender("dense", sp.build("dense"), {}, tail))
    assert not all_kept.error
    assert all(one.divergence is not None and one.divergence.kl < 1e-5 for one in all_kept.chunks)
    assert [96, 48, 47] == [one.divergence.rows for one in all_kept.chunks if one.divergence is not None]
    found = dense.run(sparse(tail))
    assert all(one.divergence is not None and one.divergence.kl > 1e-4 for one in found.chunks)
    assert all(0 < one.density < 1 and one.seconds > 0 for one in found.chunks)


def test_agents_texts_have_more_in_them_the_longer_they_are(embedded_tokenizer: Any) -> None:
    few, many = (
        agents.texts_of(embedded_tokenizer, Shape(prefix, 2048, 2), 1, 0, ("code",))[0] for prefix in (4096, 28672)
    )
    assert (16, 12) == (len(few.copies), len(few.inside))
    assert (32, 32) == (len(many.copies), len(many.inside))


def played(name: str, pipeline: Any, **scores: tuple[bool, ...]) -> Played:
    return Played("lookups", "t", Contender(name, pipeline), 100, scores, 0.5, {"too odd": 2} if pipeline else {})


def test_settings_of_one_method_have_rows_of_their_own() -> None:
    stock = played("stock", None, begin=(True, True))
    many, few = (played("streaming", 1, begin=(found, True)) for found in (True, False))
    many, few = (
        evolve(one, contender=evolve(one.contender, parameters={"window": n})) for n, one in ((64, many), (8, few))
    )
    table = results.asked_table("lookups", [stock, many, few])
    assert ["dense (stock)", "streaming window=64", "streaming window=8"] == [row[0] for row in table.rows]
    assert ["2 / 2", "2 / 2", "1 / 2 -1"] == [row[2] for row in table.rows]


def test_what_dense_cannot_do_is_left_out_by_name() -> None:
    yes, no = True, False
    stock = played("stock", None, begin=(yes, no, no, yes), end=(no, yes, no))
    found = [stock, played("streaming", sparse().pipeline, begin=(yes, yes, yes, no))]
    table = results.asked_table("lookups", [*found, evolve(stock, text="u")])
    assert ["method", "density", "begin"] == list(table.heads)
    assert ["4 / 8", "3 / 4 -1 +2"] == [row[2] for row in table.rows]
    assert "left out: end, of which dense attention itself gets 2 of 6 right" == table.remarks[0]
    assert "streaming ran dense in 2 calls of a layer: too odd" in table.remarks
    failed = results.asked_table("lookups", [found[0], evolve(found[1], error="no room", scores={})])
    assert "failed" in failed.rows[1]
    assert "streaming failed on t: no room" in failed.remarks


def test_agents_have_a_row_for_each_turn() -> None:
    yes, no = True, False
    mine, theirs = ({"copies": one, "facts": (no, no)} for one in ((yes, yes, no), (no, yes, yes)))
    stock = agents.Run("t", STOCK, tuple(agents.Chunk(theirs, None, 1.0, one) for one in (2.0, 4.0)))
    chunks = tuple(evolve(one, seconds=1.0, scores=mine) for one in stock.chunks)
    other = evolve(stock, contender=sparse(), chunks=chunks)
    table = results.agents_table([stock, other])
    assert ["2 / 3"] * 2 + ["2 / 3 -1 +1"] * 2 == [row[2] for row in table.rows]
    assert ["prefix", "1"] * 2 == [row[1] for row in table.rows]
    assert "left out: facts, of which dense attention itself gets 0 of 4 right" == table.remarks[0]
    assert ["1.00", "1.00", "2.00", "4.00"] == [row[-1] for row in table.rows]
    broken = results.agents_table([stock, evolve(other, chunks=(), error="no room")])
    assert 3 == len(broken.rows)
    assert "streaming failed on t: no room" in broken.remarks


SMALL = (
    "--device",
    "cpu",
    "--threads",
    "1",
    "--texts",
    "2",
    "--kind",
    "code",
    "--kind",
    "docs",
    "--method",
    "streaming",
)
ASKED = ("--tokens", "2560", "--questions", "4")
AGENTS = ("--task", "agents", "--prefix", "512", "--turn", "256", "--turns", "2")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app.app, list(arguments))


@pytest.fixture
def longer(folder: Path, tmp_path: Path) -> str:
    """The random model, said to read 4,096 tokens."""
    for one in folder.iterdir():
        (tmp_path / one.name).write_bytes(one.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    return str(tmp_path)


def test_the_command(longer: str, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.json", "a.md")]
    options = [f"--{option}={path}" for option, path in zip(("json", "markdown"), files, strict=True)]
    settings = ("--set", "streaming.window=64", "--set", "streaming.sink=64")
    tasks = ("--task", "lookups", "--task", "requests", "--task", "chain")
    result = run("--model", longer, *tasks, *AGENTS, *ASKED, *SMALL, *settings, *options)
    assert 0 == result.exit_code, result.output
    facts = json.loads(files[0].read_text())
    assert 3 * 2 * 2 == len(facts["conversations"])
    assert 2 * 2 == len(facts["agents"])
    assert {"code 0", "docs 0"} == {one["text"] for one in facts["agents"]}
    assert facts["chat_template"] is False
    mine = [one for one in facts["conversations"] if one["method"] == "streaming"]
    assert all({"window": 64, "sink": 64} == one["parameters"] and 0 < one["density"] < 1 for one in mine)
    assert [3, 3] == [len(one["chunks"]) for one in facts["agents"] if one["method"] == "streaming"]
    assert all("kl" in chunk for one in facts["agents"] for chunk in one["chunks"] if not one["dense"])
    by_name = {one["method"]: one["scores"] for one in facts["conversations"] if one["task"] == "requests"}
    for column, one in by_name["streaming"].items():  # of the last text
        pairs = list(zip(one["answers"], by_name["stock"][column]["answers"], strict=True))
        assert (pairs.count(("0", "1")), pairs.count(("1", "0"))) == (one["lost"], one["won"])
        assert (one["answers"].count("1"), len(pairs)) == (one["right"], one["asked"])
    text = files[1].read_text()
    for words in ("### lookups: ", "### requests: ", "### chain: ", "### agents: 2 texts", "left out: "):
        assert words in text
    assert "no chat template" in result.stderr


def test_ctrl_c_shows_what_was_measured(longer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopping(reader: Any, tokenizer: Any, task: str, talk: Talk, contender: Contender) -> Played:
        if contender.pipeline is not None:
            raise KeyboardInterrupt
        return play(reader, tokenizer, task, talk, contender)

    monkeypatch.setattr(app, "play", stopping)
    result = run("--model", longer, "--task", "chain", *ASKED, *SMALL, "--json", "-")
    assert 130 == result.exit_code
    facts = json.loads(result.stdout)
    assert facts["stopped"] is True
    assert ["stock"] == [one["method"] for one in facts["conversations"]]
    assert "stopped after 1 of 4 readings" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--task", "lookups", "--tokens", "99999"), ("--tokens 99999", "the model reads at most 1024")),
        (("--task", "agents"), ("--prefix 24576 --turn 8192 --turns 5", "reads at most 1024", "65536 tokens")),
        (("--task", "lookups", "--tokens", "512"), ("--tokens 512", "need more; pass")),
        (("--task", "requests", "--tokens", "512"), ("--tokens 512", "12 notes need more; pass")),
        (("--method", "rowmx"), ("no method is named 'rowmx'",)),
        (("--method", "rowmax", "--set", "rowmax.epz=1"), ("no parameter 'epz'",)),
        (("--task", "lookups", "--tokens", "1024", "--kind", "poems"), ("kinds holds 'poems'",)),
    ],
)
def test_the_command_refuses(arguments: tuple[str, ...], words: tuple[str, ...], folder: Path) -> None:
    refused(run("--device", "cpu", "--model", str(folder), *arguments), *words)


def test_a_model_without_a_tokenizer_or_whose_cache_cannot_be_cut_is_refused(folder: Path, tmp_path: Path) -> None:
    for one in folder.iterdir():
        if "token" not in one.name:
            (tmp_path / one.name).write_bytes(one.read_bytes())
    arguments = ("--device", "cpu", "--model", str(tmp_path))
    refused(run(*arguments), f"--model {tmp_path}: ")
    for one in folder.iterdir():
        (tmp_path / one.name).write_bytes(one.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    sliding = {**config, "model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(sliding))
    refused(run(*arguments, "--task", "chain", "--tokens", "1024"), "layers of sliding_attention", "--task agents")
