"""What stands behind `demo`: greedy answers, the shared context, and contenders that fail or fall back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sparseprefill.adapters.demo.exam import MOST, greedy, make_exam, take
from sparseprefill.adapters.demo.tasks import FAMILIES
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

TEXT = 40


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
    )
    made: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return made


def _plain(model: LlamaForCausalLM, ids: list[int], count: int) -> list[int]:
    """Greedy decoding, one token at a time, from scratch each time."""
    found: list[int] = []
    for _ in range(count):
        with torch.inference_mode():
            found.append(int(model(torch.tensor([ids + found])).logits[0, -1].argmax()))
    return found


@pytest.mark.parametrize("agreed", [0, 1, 5, 11, 12])
def test_greedy_is_greedy_whatever_the_draft(model: LlamaForCausalLM, agreed: int) -> None:
    torch.manual_seed(agreed)
    text, prompt = (torch.randint(64, (n,)).tolist() for n in (TEXT, 7))
    truth = _plain(model, text + prompt, 12)
    draft = truth[:agreed] + [(token + 1) % 64 for token in truth[agreed:]]
    cache: Any = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([text]), past_key_values=cache)
    before = [layer.keys.clone() for layer in cache.layers]
    for _ in range(2):
        assert greedy(model, cache, prompt, draft) == truth
        assert cache.get_seq_length() == TEXT
    for kept, layer in zip(before, cache.layers, strict=True):
        assert torch.equal(kept, layer.keys)


@pytest.mark.parametrize("agreed", [0, 3, 12])
def test_greedy_leaves_a_sliding_window_as_it_was(agreed: int) -> None:
    """Of a cache that forgets: a question is read behind the prompt, and the next one behind the prompt alone."""
    torch.manual_seed(agreed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config: Any = MistralConfig(vocab_size=64, num_hidden_layers=2, sliding_window=16, **sizes)  # type: ignore[arg-type]
    model: Any = MistralForCausalLM(config).eval()
    text, prompt = (torch.randint(64, (n,)).tolist() for n in (TEXT, 7))
    truth = _plain(model, text + prompt, 12)
    draft = truth[:agreed] + [(token + 1) % 64 for token in truth[agreed:]]
    with torch.inference_mode():
        cache = model(torch.tensor([text]), use_cache=True).past_key_values
    for _ in range(2):
        assert greedy(model, cache, prompt, draft) == truth
        assert cache.get_seq_length() == TEXT


def test_exam_holds_the_needles_of_every_family(embedded_tokenizer: Any) -> None:
    exam = make_exam(embedded_tokenizer, 2048, 3, 2)
    assert [task.family for task in exam.tasks] == list(FAMILIES)
    assert exam.questions == 7
    lines = exam.context.splitlines()
    needles = [needle for task in exam.tasks for needle in task.needles]
    assert all(lines.count(needle) == 1 for needle in needles)
    keys = [{needle.rpartition(" is ")[0] for needle in task.needles} for task in exam.tasks]
    assert len(set().union(*keys)) == sum(map(len, keys))
    for task in exam.tasks:
        for question in task.questions:
            assert len(embedded_tokenizer(exam.context + question.text + question.answer)["input_ids"]) <= 2048
    assert make_exam(embedded_tokenizer, 2048, 3, 2) == exam
    assert make_exam(embedded_tokenizer, 2048, 4, 2) != exam


def test_exam_counts_right_answers(embedded_tokenizer: Any) -> None:
    exam = make_exam(embedded_tokenizer, 2048, 0, 1)
    assert take(exam, lambda question, expected: expected) == {
        "single": (1, 1),
        "multikey": (1, 1),
        "multivalue": (4, 4),
        "multiquery": (4, 4),
    }
    assert all(right == 0 for right, _ in take(exam, lambda question, expected: "").values())


def test_exam_refuses(embedded_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="more tokens"):
        make_exam(embedded_tokenizer, 256, 0, 2)
    for questions in (0, MOST + 1):
        with pytest.raises(ValueError, match=f"pass 1 to {MOST}"):
            make_exam(embedded_tokenizer, 2048, 0, questions)
    assert (
        make_exam(embedded_tokenizer, 16384, 0, MOST).questions == 1 + 3 * MOST + 4
    )  # and the last keys of four chains
