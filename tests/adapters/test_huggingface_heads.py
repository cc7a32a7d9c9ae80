"""Models whose outputs are not logits of each token, and models that put something in front: attached without need to
give the dry run up, and served."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from sparseprefill.adapters.huggingface import attach
from torch import nn
from transformers import DynamicCache

import sparseprefill as sp
from helpers import hf_models
from helpers.hf_models import STREAMING

VIRTUAL = 5
OPTIONS: dict[str, Any] = {"gate": None, "tail": 0, "strict": True, **STREAMING}


def headed(head: str, **changes: Any) -> Any:
    """A Llama with another head than that of a language model."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**hf_models.SIZES, **changes})
    return getattr(transformers, f"LlamaFor{head}")(config).eval()


class Wrapped(nn.Module):
    """A language model inside of a module, as adapters of PEFT have it."""

    def __init__(self, base: Any = None) -> None:
        super().__init__()
        self.base_model = hf_models.build("llama") if base is None else base
        self.config = self.base_model.config
        torch.manual_seed(1)
        self.prompt = nn.Parameter(torch.randn(VIRTUAL, self.config.hidden_size))

    @staticmethod
    def longer(mask: torch.Tensor | None) -> torch.Tensor | None:
        return None if mask is None else torch.cat([mask.new_ones(mask.shape[0], VIRTUAL), mask], 1)


class PromptTuned(Wrapped):
    """Virtual tokens in front of a prompt, as embeddings."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **more: Any) -> Any:
        words = self.base_model.get_input_embeddings()(input_ids)
        embeds = torch.cat([self.prompt.expand(words.shape[0], -1, -1), words], 1)
        return self.base_model(inputs_embeds=embeds, attention_mask=self.longer(attention_mask), **more)


class PrefixTuned(Wrapped):
    """Keys and values of virtual tokens, as a cache."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **more: Any) -> Any:
        cache, config = DynamicCache(config=self.config), self.config
        for layer in range(config.num_hidden_layers):
            states = self.prompt.view(1, VIRTUAL, config.num_key_value_heads, -1).transpose(1, 2)
            states = states[..., : config.head_dim].expand(input_ids.shape[0], -1, -1, -1)
            cache.update(states, states, layer)
        return self.base_model(input_ids, attention_mask=self.longer(attention_mask), past_key_values=cache, **more)


class Rewarding(Wrapped):
    """A number for each row; of the last token, or the mean over all of them."""

    def __init__(self, mean: bool) -> None:
        super().__init__(hf_models.build("llama").model)
        self.mean = mean
        self.base_model.set_attn_implementation("eager")  # which lets rows of padding see every key

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        states = self.base_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return SimpleNamespace(logits=(states.mean(1) if self.mean else states[:, -1]) @ self.prompt.T)


class Choosing(Wrapped):
    """Which of several prompts: token ids ``[B, choices, n]``."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        flat = input_ids.view(-1, input_ids.shape[-1])
        mask = None if attention_mask is None else attention_mask.view(flat.shape)
        states = self.base_model(input_ids=flat, attention_mask=mask).logits[:, -1, 0]
        return (states.view(-1, input_ids.shape[1]).softmax(-1) if input_ids.dim() == 3 else states.view(0, 3),)


class Seeing(Wrapped):
    """Needs more than token ids."""

    def forward(self, input_ids: torch.Tensor, pixels: torch.Tensor) -> Any:
        return self.base_model(input_ids=input_ids, use_cache=False).logits + pixels


class Held(nn.Module):
    """A wrapper that does not say where its model is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"policy": hf_models.build("llama")})

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.inner["policy"](tokens).logits


class Answering(Wrapped):
    """Starts and ends, in an object of no known kind."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        states = self.base_model(input_ids=input_ids, attention_mask=attention_mask).logits
        return SimpleNamespace(start=states[..., 0], logits=states[..., 1])


class Nameless(Wrapped):
    """Its configuration does not say how many tokens there are."""

    def __init__(self) -> None:
        super().__init__()
        del self.config.vocab_size

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        return (self.base_model.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state,)


MODELS: dict[str, Any] = {
    "question answering": lambda: headed("QuestionAnswering"),
    "sequence classification": lambda: headed("SequenceClassification"),
    "sequence classification without padding token": lambda: headed("SequenceClassification", pad_token_id=None),
    "as many labels as tokens": lambda: headed("SequenceClassification", num_labels=64),
    "token classification": lambda: headed("TokenClassification"),
    "tuples of hidden states": lambda: headed("CausalLM", return_dict=False).model,
    "prompt tuning": PromptTuned,
    "prefix tuning": PrefixTuned,
    "reward of the last token": lambda: Rewarding(False),
    "reward of all tokens": lambda: Rewarding(True),
    "multiple choice": Choosing,
    "other inputs": Seeing,
    "a wrapper": Held,
    "an output of its own": Answering,
    "no size of the vocabulary": Nameless,
    "float64 under eager": lambda: hf_models.build("qwen3").double(),
}
INPUTS: dict[str, Any] = {
    "multiple choice": lambda: {"input_ids": hf_models.prompt(120, 3)[None]},
    "other inputs": lambda: {"input_ids": hf_models.prompt(120), "pixels": torch.ones(97)},
    "a wrapper": lambda: {"tokens": hf_models.prompt(120)},
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_head_of_any_kind_is_attached_and_runs_sparse(name: str) -> None:
    model = MODELS[name]()
    inputs = INPUTS.get(name, lambda: {"input_ids": hf_models.prompt(120)})()
    with attach(model, "streaming", **OPTIONS) as handle:
        assert 2 == len(handle.report().layers)
        model(**inputs)
    assert ["sparse", "sparse"] == [layer.mode for layer in handle.report().layers]
    assert {} == handle.report().fallbacks


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_with_a_full_mask_it_is_the_stock_model(name: str) -> None:
    model = MODELS[name]()
    inputs = INPUTS.get(name, lambda: {"input_ids": hf_models.prompt(120)})()

    def first() -> Any:
        """What the model gives first, in whichever form."""
        given: Any = model(**inputs)
        return given.logits if isinstance(given, SimpleNamespace) else given[0]

    wanted = first()
    with attach(model, "dense", block=16, gate=None, strict=True):
        torch.testing.assert_close(first(), wanted, atol=2e-5, rtol=1e-4)


LEFT_OUT = {
    "prompt tuning": "every layer of PromptTuned stays dense: the attention mask has holes",
    "prefix tuning": "every layer of PrefixTuned stays dense: the attention mask has holes",
    "reward of all tokens": "it reads rows of padding",
    "sequence classification without padding token": "LlamaForSequenceClassification fails: ValueError",
    "other inputs": "Seeing fails: TypeError",
    "float64 under eager": "with 2 x 64 random tokens and left padding the model's own logits are not finite",
}


@pytest.mark.parametrize("name", MODELS)
def test_what_the_dry_run_left_out_is_noted_and_nothing_else(name: str) -> None:
    with attach(MODELS[name](), "streaming", **OPTIONS) as handle:
        notes = list(handle.report().notes)
    if name in ("multiple choice",):
        assert "1 x 2 x 64 random tokens" in notes[0]
    elif name in LEFT_OUT:
        assert LEFT_OUT[name] in notes[0]
    else:
        assert [] == notes


def test_a_head_does_not_hide_what_is_wrong() -> None:
    """The logits of a decoder that mixes something else in differ, whatever reads them."""
    model = Rewarding(True)
    forward = model.base_model.forward

    def other(*given: Any, **more: Any) -> Any:
        found = forward(*given, **more)
        if str(model.config._attn_implementation).startswith("sparseprefill"):
            found.last_hidden_state = found.last_hidden_state.roll(1, -1)
        return found

    model.base_model.forward = other
    with pytest.raises(sp.AttachError, match="does not compute plain attention"):
        attach(model, "dense")


@torch.no_grad()
def test_a_window_as_wide_as_all_that_the_model_reads_is_none() -> None:
    inside, window = hf_models.build("phi3", sliding_window=512), hf_models.build("phi3", sliding_window=511)
    with attach(inside, "streaming", **OPTIONS) as handle:
        hf_models.logits(inside)
        assert ["sparse"] * 2 == [layer.mode for layer in handle.report().layers]
        inside(hf_models.prompt(600))  # beyond what it was made for the window cuts
        assert ["window"] * 2 == [layer.mode for layer in handle.report().layers]
    with attach(window, "streaming", **OPTIONS) as handle:
        hf_models.logits(window)
    assert ["window"] * 2 == [layer.mode for layer in handle.report().layers]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("head", ["CausalLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_the_evaluation_of_a_trainer(head: str, tmp_path: Path) -> None:
    model = headed(head)
    ids = hf_models.prompt(120, 2)
    labels: dict[str, Any] = {
        "CausalLM": {"labels": ids},
        "SequenceClassification": {"labels": torch.tensor([0, 1])},
        "TokenClassification": {"labels": ids % 2},
        "QuestionAnswering": {"start_positions": torch.tensor([3, 4]), "end_positions": torch.tensor([5, 6])},
    }[head]
    data: Any = [{"input_ids": ids[i], **{name: x[i] for name, x in labels.items()}} for i in range(2)]
    args = transformers.TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    with attach(model, "streaming", **OPTIONS) as handle:
        found = transformers.Trainer(model, args, eval_dataset=data).evaluate()
    assert found["eval_loss"] > 0
    assert ["sparse", "sparse"] == [layer.mode for layer in handle.report().layers]


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_tensors_for_a_loss_and_other_readers_change_nothing(implementation: str) -> None:
    """The host's own attention does not read them; what tells of packed rows is another matter."""
    model = hf_models.build("llama")
    model.set_attn_implementation(implementation)
    ids = hf_models.prompt(120)
    more = {"num_items_in_batch": torch.tensor(3), "shift_labels": ids, "weight": torch.ones(3), "mine": [ids]}
    with attach(model, "streaming", **OPTIONS) as handle:
        model(ids, **more)
    assert {} == handle.report().fallbacks
    with attach(model, "streaming", **{**OPTIONS, "strict": False}) as handle:
        model(ids, cu_seq_lens_q=torch.tensor([0, 60, 120]), cu_seq_lens_k=torch.tensor([0, 60, 120]))
        model(ids, position_bias=torch.zeros(1, 4, 120, 120)) if implementation == "sdpa" else None
    wanted = {"the layer passes cu_seq_lens_k, cu_seq_lens_q": 2}
    biased = {"the layer passes position_bias": 2} if implementation == "sdpa" else {}
    assert {**wanted, **biased} == handle.report().fallbacks
