"""Public tasks through lm-evaluation-harness: the same items, the harness's own scores, and who really ran sparse."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from sparseprefill.adapters.demo.model import CHECKPOINT, load_model
from sparseprefill.adapters.evaluation import harness
from sparseprefill.adapters.evaluation.outcome import Contender
from sparseprefill.adapters.evaluation.scores import Run, Score
from sparseprefill.adapters.huggingface.identity import identity
from sparseprefill.adapters.huggingface.inspection import find_decoder
from transformers import LlamaConfig, LlamaForCausalLM

import sparseprefill as sp
from helpers.examples import few_of
from helpers.harness_tasks import LENGTH, cut_off, need_harness, needles, write_task
from helpers.stubs import Estimate
from sparseprefill.errors import ParameterError
from sparseprefill.pipeline import Pipeline
from sparseprefill.profiles.profile import LengthRange, Profile

need_harness()

STREAMING = Contender("streaming", sp.build("streaming", sink=4, window=64), dense_tail=0)  # which is what it loses
DENSE = Contender("dense", sp.build("dense"))


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return load_model(torch.float32)


@pytest.fixture(scope="module")
def random_model() -> Any:
    """Two layers with random weights, for the embedded tokenizer; reads 4,096 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every test runs without a network, and none may so much as try it."""
    tried = cut_off(monkeypatch)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # seconds each, of the reference alone
    yield tried
    assert tried == []


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A task that the embedded model can do."""
    return str(write_task(tmp_path_factory.mktemp("needles"), needles(8)))


def by_harness(model: Any, tokenizer: Any, task: str, limit: int | None = None, **metadata: Any) -> Any:
    """The harness's own front door, without anything of ours."""
    import lm_eval.tasks
    from lm_eval.evaluator import simple_evaluate

    host: Any = import_module("lm_eval.models.huggingface")
    folder = Path(lm_eval.tasks.__file__).parent / "ruler"
    manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=folder, metadata=metadata)
    return simple_evaluate(
        host.HFLM(pretrained=model, tokenizer=tokenizer), tasks=[task], limit=limit, task_manager=manager
    )


def only(found: list[Run], name: str) -> Run:
    (run,) = (one for one in found if one.contender.name == name)
    assert run.error == ""
    return run


def test_stock_and_dense_are_the_harness_to_the_digit(model: Any, embedded_tokenizer: Any, task: str) -> None:
    found = list(harness.evaluate(model, embedded_tokenizer, [task], contenders=[DENSE, STREAMING]))
    assert [run.contender.name for run in found] == ["stock", "dense", "streaming"]
    expected = by_harness(model, embedded_tokenizer, task)
    results = expected["results"]["needles"]
    stock, dense, streaming = (only(found, name).scores[0] for name in ("stock", "dense", "streaming"))
    assert stock.metric == "exact_match"
    assert 0 < results["exact_match,none"] == stock.value == dense.value
    assert results["exact_match_stderr,none"] == stock.stderr == dense.stderr
    assert tuple(one["exact_match"] for one in expected["samples"]["needles"]) == stock.values == dense.values
    # A window of 64 tokens hides the needles: the method did run.
    assert streaming.value < stock.value
    lost = sum(a > b for a, b in zip(stock.values, streaming.values, strict=True))
    assert (lost, 0) == (streaming.lost, streaming.won)
    assert (None, 0, 0) == (stock.lost, dense.lost, dense.won)
    assert only(found, "stock").service is None
    service = only(found, "streaming").service
    assert service is not None
    assert service.doubt == ""
    assert service.sparse_calls == 6 * only(found, "streaming").items
    assert service.density is not None
    assert 0 < service.density < 0.8
    dense_service = only(found, "dense").service
    assert dense_service is not None
    assert dense_service.density == pytest.approx(1.0)


@pytest.mark.parametrize("task", few_of(harness.OFFLINE, ["niah_single_1", "ruler_vt"]))
def test_offline_tasks_ask_the_harness_own_items(
    task: str, random_model: Any, embedded_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    whole = random_model.generate

    def generate(input_ids: Any, **options: Any) -> Any:
        asked.append(embedded_tokenizer.decode(input_ids[0]))
        return whole(input_ids=input_ids, **options)

    monkeypatch.setattr(random_model, "generate", generate)
    found = list(harness.evaluate(random_model, embedded_tokenizer, [task], [LENGTH], [DENSE], limit=2))
    mine, asked[:] = asked[:], []
    metadata = {"pretrained": str(CHECKPOINT), "max_seq_lengths": [LENGTH]}
    expected = by_harness(random_model, embedded_tokenizer, task, 2, **metadata)["results"][task]
    assert len(asked) == 2
    assert asked * 2 == mine  # stock and dense
    for run in found:
        assert (task, LENGTH, 2, "") == (run.task, run.length, run.items, run.error)
        assert [str(LENGTH)] == [score.metric for score in run.scores]
        assert expected[f"{LENGTH},none"] == run.scores[0].value
        assert LENGTH / 2 < run.tokens <= LENGTH
    assert found[1].service is not None
    assert found[1].service.doubt == ""


def test_lengths_are_limited_each_and_come_in_order(random_model: Any, embedded_tokenizer: Any) -> None:
    heard: list[tuple[str, str, int, int]] = []

    class Listener:
        def contender(self, name: str) -> Any:
            from contextlib import nullcontext

            return nullcontext(lambda what, done, of: heard.append((name, what, done, of)))

    found = list(
        harness.evaluate(
            random_model, embedded_tokenizer, ["niah_single_1"], [2048, 1024], [STREAMING], limit=1, listener=Listener()
        )
    )
    assert [(1024, "stock"), (1024, "streaming"), (2048, "stock"), (2048, "streaming")] == [
        (run.length, run.contender.name) for run in found
    ]
    assert [1] * 4 == [run.items for run in found]
    assert ("streaming, niah_single_1 2,048", "items", 1, 1) == heard[-1]


def test_rows_of_a_batch_score_as_alone(model: Any, embedded_tokenizer: Any, task: str) -> None:
    alone, together = (
        list(
            harness.evaluate(
                model, embedded_tokenizer, [task], contenders=[STREAMING], limit=6, batch_size=size, stock=False
            )
        )
        for size in (1, 3)
    )
    assert [6] == [run.items for run in together]
    assert [run.scores for run in alone] == [run.scores for run in together]


def test_a_dense_run_is_not_taken_for_a_sparse_one(random_model: Any, embedded_tokenizer: Any) -> None:
    made_for = identity(find_decoder(random_model))
    parameters = {"sink": 1, "window": 32}
    ranges = (
        LengthRange(least=0, tokens=64, method=None, parameters=None),
        LengthRange(least=1700, tokens=2048, method="streaming", parameters=parameters),
    )
    profile = Profile(methods=("streaming",), model=made_for, ranges=ranges)
    tuned = Contender("streaming", sp.build("streaming", profile=profile))
    found = list(harness.evaluate(random_model, embedded_tokenizer, ["niah_single_1"], [1024, 2048], [tuned], limit=1))
    short, long = (run.service for run in found if run.contender is tuned)
    assert short is not None
    assert long is not None
    assert (0, 2) == (short.sparse_calls, short.dense_calls)
    assert short.density is None
    assert "never ran sparse; its score is that of dense attention" in short.doubt
    assert "2x" in short.doubt
    assert ("", 2) == (long.doubt, long.sparse_calls)


def test_a_method_that_fails_ends_alone(random_model: Any, embedded_tokenizer: Any) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("out of luck")

    broken = Contender("broken", Pipeline(Estimate(fail), name="broken"))
    found = list(
        harness.evaluate(random_model, embedded_tokenizer, ["niah_single_1"], [1024], [broken, STREAMING], limit=1)
    )
    assert [False, True, False] == [bool(run.error) for run in found]
    assert "out of luck" in found[1].error
    assert found[1].scores == ()


def test_ctrl_c_leaves_the_model_as_it_was(random_model: Any, embedded_tokenizer: Any) -> None:
    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    interrupted = Contender("interrupted", Pipeline(Estimate(stop), name="interrupted"))
    before = random_model.config._attn_implementation
    asked = (random_model, embedded_tokenizer, ["niah_single_1"], [1024])
    found = harness.evaluate(*asked, [interrupted], limit=1)
    assert next(found).contender.name == "stock"
    with pytest.raises(KeyboardInterrupt):
        next(found)
    assert before == random_model.config._attn_implementation
    assert [""] * 2 == [run.error for run in harness.evaluate(*asked, [STREAMING], limit=1)]


@pytest.fixture(scope="module")
def bare_tokenizer(embedded_tokenizer: Any) -> Any:
    """The embedded one, but it declares no special token."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=embedded_tokenizer.backend_tokenizer)


def test_a_tokenizer_without_an_end_is_refused(random_model: Any, bare_tokenizer: Any) -> None:
    with pytest.raises(ParameterError, match=r"tokenizer\.eos_token is None.*set tokenizer\.eos_token"):
        next(harness.evaluate(random_model, bare_tokenizer, ["niah_single_1"], [1024], limit=1))


def test_what_the_harness_cuts_is_told(random_model: Any, embedded_tokenizer: Any, tmp_path: Path) -> None:
    task = str(write_task(tmp_path, [("apple pear " * 3000, "plum"), ("stone " * 6000, "gravel")]))
    (run,) = harness.evaluate(random_model, embedded_tokenizer, [task], limit=2)
    assert run.tokens > 3000
    assert {count for text, count in run.warnings.items() if "Left truncation" in text} == {2}


def test_nothing_is_printed(random_model: Any, embedded_tokenizer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    list(harness.evaluate(random_model, embedded_tokenizer, ["ruler_vt"], [LENGTH], [STREAMING], limit=1))
    assert ("", "") == capfd.readouterr()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tasks": []}, "tasks is empty"),
        ({"lengths": []}, "lengths is empty"),
        ({"lengths": [512]}, "lengths holds 512: pass integers >= 1024"),
        ({"lengths": [4097]}, "lengths holds 4097: the model reads at most 4096 tokens"),
        ({"lengths": ["1024"]}, "lengths holds '1024'"),
        ({"limit": 0}, "limit is 0: pass an integer >= 1"),
        ({"batch_size": True}, "batch_size is True"),
        ({"stock": "no"}, "stock is 'no': pass True or False"),
        ({"chat_template": 1}, "chat_template is 1: pass True or False"),
        ({"chat_template": True}, "the tokenizer has no chat template"),
        ({"tasks": ["ruler_cwe"], "lengths": [4096]}, "ruler_cwe does not fit its text into 4,096 tokens"),
    ],
)
def test_refused(random_model: Any, embedded_tokenizer: Any, arguments: dict[str, Any], words: str) -> None:
    given = {"tasks": ["niah_single_1"], "lengths": [1024], "limit": 1, **arguments}
    with pytest.raises(ParameterError, match=words):
        next(harness.evaluate(random_model, embedded_tokenizer, contenders=[STREAMING], **given))


def test_chains_longer_than_the_text_are_refused(
    random_model: Any, embedded_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "CHAINS_EXAMPLE", 1000)
    with pytest.raises(ParameterError, match=r"ruler_vt needs 1,\d\d\d tokens with this tokenizer, not 1,024"):
        next(harness.evaluate(random_model, embedded_tokenizer, ["ruler_vt"], [1024], [STREAMING], limit=1))


def test_names_that_are_drawn_twice_do_not_stop_a_task(
    random_model: Any, embedded_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RULER draws five names of three letters for a text, and fails where two are the same, in one of 1,800."""
    from lm_eval.tasks.ruler import vt_utils

    drawn, generate = [0], vt_utils.generate_input_output

    def often(*args: Any, **named: Any) -> Any:
        drawn[0] += 1
        if 1 < drawn[0] < 400 and drawn[0] % 3 == 0:
            raise IndexError("list index out of range")
        return generate(*args, **named)

    monkeypatch.setattr(vt_utils, "generate_input_output", often)
    (run,) = harness.evaluate(random_model, embedded_tokenizer, ["ruler_vt"], [LENGTH], limit=1)
    assert not run.error
    assert drawn[0] > 400


def test_a_task_that_needs_a_network(random_model: Any, embedded_tokenizer: Any, network: list[Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        next(harness.evaluate(random_model, embedded_tokenizer, ["niah_single_2"], [2048], limit=1))
    network.clear()  # this one may try
    assert "the task niah_single_2 cannot be loaded at 2,048 tokens: ConnectionError" in str(caught.value)
    assert "niah_single_1, niah_multikey_2, niah_multikey_3, ruler_vt, ruler_fwe need none" in str(caught.value)


def test_scores_of_items() -> None:
    def beside(score: Score) -> tuple[int | None, int | None]:
        found = score.beside(Run("t", None, Contender("stock"), scores=(stock,)))
        return found.lost, found.won

    stock = Score.of("m", 0.5, None, True, (1.0, 0.0, 1.0, 0.0))
    assert stock.stderr == pytest.approx(0.28867513)
    other = Score.of("m", 0.5, 0.25, True, (0.0, 0.0, 1.0, 1.0))
    assert other.stderr == 0.25
    assert beside(other) == (1, 1)
    worse = Score("m", 1.0, values=(0.0, 0.5, 1.0, 0.0))
    assert beside(worse) == (1, 1)
    assert beside(Score("m", 1.0, None, False, (0.0, 0.0, 1.0, 0.0))) == (0, 1)
    assert beside(Score("m", 1.0)) == beside(Score("n", 1.0, values=stock.values)) == (None, None)
    assert stock.beside(None) is stock
    assert Score.of("rouge", 0.7, None, True, (0.1, 0.2)).stderr is None
