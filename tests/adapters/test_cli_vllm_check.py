"""`sparseprefill vllm-check`: a configuration is judged without vLLM, a server, or a model's weights."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from sparseprefill.adapters.demo.model import CHECKPOINT

from .test_cli import invoke, refused

STREAMING: dict[str, Any] = {"method": "streaming", "parameters": {"sink": 64, "window": 256}}
PROFILE = Path(__file__).parent / "vllm" / "embedded.profile.json"


def under(table: object) -> str:
    """What vLLM gets as --additional-config."""
    return json.dumps({"sparseprefill": table})


def model(folder: Path, **changes: Any) -> str:
    """The configuration of the model that ships, with changes; no weights."""
    known = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**known, **changes}), encoding="utf-8")
    return str(folder)


def test_what_a_server_would_run(tmp_path: Path) -> None:
    table = {**STREAMING, "chunk": 256, "profiles": {"all": {"method": "dense"}}}
    given = tmp_path / "given.json"
    given.write_text(under(table), encoding="utf-8")
    for config in (str(given), under(table)):
        result = invoke("vllm-check", config, "--model", model(tmp_path))
        assert (0, "") == (result.exit_code, result.stderr)
        assert [
            "LlamaForCausalLM: 6 layers, 4 query and 2 KV heads of size 64",
            "streaming in 6 of 6 layers",
            "profile all: dense in 6 of 6 layers",
            "the server needs --attention-backend CUSTOM",
            "the server needs --scheduler-cls sparseprefill.adapters.vllm.scheduler.fixed_chunks",
        ] == result.stdout.splitlines()


def test_a_toml_file_and_a_profile(tmp_path: Path) -> None:
    given = tmp_path / "given.toml"
    given.write_text(f"[sparseprefill]\nprofile = {str(PROFILE)!r}\n", encoding="utf-8")
    result = invoke("vllm-check", str(given), "--model", str(CHECKPOINT), "--json")
    (found,) = json.loads(result.stdout)["expected"]
    assert ("sample-attention", 6, {}) == (found["method"], found["sparse"], found["dense"])
    other = model(tmp_path, num_hidden_layers=7)
    refused(invoke("vllm-check", str(given), "--model", other), "was made for", "layers")


def test_layers_that_a_profile_keeps_dense_at_every_length_are_named(tmp_path: Path) -> None:
    facts = json.loads(PROFILE.read_text(encoding="utf-8"))
    given = tmp_path / "given.json"

    def checked(**changes: Any) -> Any:
        (tmp_path / "profile.json").write_text(
            json.dumps({**facts, "ranges": [{**one, **changes} for one in facts["ranges"]]}), encoding="utf-8"
        )
        given.write_text(under({"profile": str(tmp_path / "profile.json")}), encoding="utf-8")
        return invoke("vllm-check", str(given), "--model", str(CHECKPOINT))

    result = checked(dense_layers=[0, 4])
    assert "sample-attention in 4 of 6 layers" in result.stdout
    assert "the profile keeps layer 4 dense at every length" in result.stdout
    nowhere: tuple[dict[str, Any], ...] = (
        {"dense_layers": list(range(6))},
        {"method": None, "parameters": None, "dense_layers": []},
    )
    for changes in nowhere:
        result = checked(**changes)
        assert result.exit_code == 1
        assert "sample-attention in 0 of 6 layers" in result.stdout, result.stderr


LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
KINDS = ["sliding_attention", "full_attention", "linear_attention", "chunked_attention", "full_attention"]


def test_layers_that_stay_dense_are_named(tmp_path: Path) -> None:
    folder = model(tmp_path, layer_types=KINDS, num_hidden_layers=5, sliding_window=64)
    result = invoke("vllm-check", under(STREAMING), "--model", folder)
    assert 0 == result.exit_code
    lines = result.stdout.splitlines()
    assert "streaming in 2 of 4 layers" in lines, "the one of linear attention has no keys"
    assert "  1 dense: the layer has a sliding window" in lines
    assert "  1 dense: the layer attends in chunks" in lines
    strict = under({**STREAMING, "strict": True})
    refused(invoke("vllm-check", strict, "--model", folder), "strict: these layers would stay dense: layer 0")
    some = under({**STREAMING, "strict": True, "layers": [1, 4]})
    assert "streaming in 2 of 2 layers" in invoke("vllm-check", some, "--model", folder).stdout


def test_multi_head_latent_attention_has_a_flag_of_its_own(tmp_path: Path) -> None:
    folder = model(tmp_path, num_key_value_heads=4, **LATENT)
    result = invoke("vllm-check", under(STREAMING), "--model", folder)
    assert [
        "LlamaForCausalLM: 6 layers, 4 query and 4 KV heads of size 192, 128 for values",
        "streaming in 6 of 6 layers",
        "the server needs --attention-config.mla_prefill_backend CUSTOM",
    ] == result.stdout.splitlines()


@pytest.mark.parametrize(
    "changes", [{"layer_types": ["sliding_attention"] * 6, "sliding_window": 64}, LATENT | {"index_topk": 64}], ids=str
)
def test_nothing_to_run_sparse_is_a_failure(changes: dict[str, Any], tmp_path: Path) -> None:
    result = invoke("vllm-check", under(STREAMING), "--model", model(tmp_path, **changes))
    assert 1 == result.exit_code
    assert "streaming in 0 of 6 layers" in result.stdout
    assert "error: nothing would run sparse" in result.stderr


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            '{"sparseprefill": {"method": "streeming"}}',
            "sparseprefill.method: no method is named 'streeming'; did you mean 'streaming'",
        ),
        (
            '{"sparseprefill": {"method": "streaming", "parameters": {"sinc": 3}}}',
            "sparseprefill.parameters.sinc is unknown; did you mean",
        ),
        ('{"sparseprefill": {"method": "streaming", "min_qery": 3}}', "sparseprefill.min_qery is unknown"),
        (
            '{"sparseprefill": {"method": "streaming", "layers": [6]}}',
            "sparseprefill.layers names 6: LlamaForCausalLM has 6 layers",
        ),
        (
            '{"sparseprefill": {"method": "anchor-attention", "chunk": 100}}',
            "sparseprefill.chunk is 100: sparseprefill (anchor-attention)",
        ),
        (
            '{"sparseprefill": {"method": "streaming", "profiles": {"a": {"method": "x"}}}}',
            "sparseprefill.profiles.a.method: no method is named 'x'",
        ),
        # What the server's own parser does not take: a table that stands alone, or under another name.
        ('{"method": "rowmax"}', "--additional-config has method at its top, where vLLM's plugins share a table: put"),
        (
            '{"tail": 3, "x": 1}',
            "has tail at its top, where vLLM's plugins share a table: put what is for sparseprefill",
        ),
        (
            '{"sparsprefill": {"method": "rowmax"}}',
            "'sparsprefill' is no key of --additional-config; did you mean 'sparse",
        ),
        ('{"sparseprefill": null}', "the backend CUSTOM is selected, but no method: add --additional-config"),
        ("{}", "the backend CUSTOM is selected, but no method: add --additional-config"),
        (
            '{"sparseprefill": {"method": "streaming", "skip_unread": true, "tail": 0}}',
            "sparseprefill.skip_unread is true, but tail is 0",
        ),
        (
            '{"sparseprefill": {"method": "streaming", "skip_unread": true, "layers": [0]}}',
            "sparseprefill.skip_unread is true, but layer 5, the model's last, cannot run sparse here",
        ),
        ("{", "{: is not JSON"),
        ("nowhere.json", "nowhere.json: No such file"),
    ],
)
def test_what_a_server_would_refuse(config: str, words: str) -> None:
    refused(invoke("vllm-check", config, "--model", str(CHECKPOINT)), words)


LOOKS_AHEAD = "the layer is of type encoder_only, not a causal decoder's"
CROSS = "the layer is of type encoder_decoder, not a causal decoder's"
# What vLLM makes of a model: layers that run, and why the others do not.
MODELS: list[tuple[str, dict[str, Any], int, dict[str, int]]] = [
    ("Bert", {"architectures": ["BertModel"]}, 0, {LOOKS_AHEAD: 3}),
    ("Bert", {"architectures": ["BertForMaskedLM"]}, 0, {LOOKS_AHEAD: 3}),
    ("XLMRoberta", {"architectures": ["XLMRobertaForSequenceClassification"]}, 0, {LOOKS_AHEAD: 3}),
    ("ModernBert", {"architectures": ["ModernBertModel"]}, 0, {LOOKS_AHEAD: 3}),
    ("Llama", {"architectures": ["LlamaModel"]}, 3, {}),
    ("Qwen3", {"architectures": ["Qwen3ForSequenceClassification"]}, 3, {}),
    ("Qwen2", {"architectures": ["Qwen2Model"], "is_causal": False}, 0, {LOOKS_AHEAD: 3}),
    ("Llama", {"architectures": ["LlamaBidirectionalModel"]}, 0, {LOOKS_AHEAD: 3}),
    (
        "Gemma3Text",
        {"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True, "layer_types": KINDS[1:2] * 3},
        0,
        {LOOKS_AHEAD: 3},
    ),
    ("Bart", {"architectures": ["BartForConditionalGeneration"], "decoder_layers": 2}, 2, {CROSS: 2}),
    ("Whisper", {"architectures": ["WhisperForConditionalGeneration"], "decoder_layers": 3}, 3, {CROSS: 3}),
    ("Bloom", {"architectures": ["BloomForCausalLM"]}, 0, {"the layer has ALiBi slopes": 3}),
    ("Falcon", {"architectures": ["FalconForCausalLM"], "alibi": True}, 0, {"the layer has ALiBi slopes": 3}),
    ("Falcon", {"architectures": ["FalconForCausalLM"]}, 3, {}),
    ("FalconH1", {"architectures": ["FalconH1ForCausalLM"]}, 3, {}),
    ("GptOss", {"layer_types": KINDS[:2] * 2, "num_hidden_layers": 4}, 2, {"the layer has a sliding window": 2}),
]


@pytest.mark.parametrize(("name", "given", "sparse", "dense"), MODELS)
def test_which_layers_can_run_is_the_server_s_rule(
    name: str, given: dict[str, Any], sparse: int, dense: dict[str, int], tmp_path: Path
) -> None:
    """Causal attention of a decoder alone: not of encoders, nor to another's keys."""
    config: Any = getattr(transformers, f"{name}Config")(**{"num_hidden_layers": 3, **given})
    config.save_pretrained(tmp_path)
    result = invoke("vllm-check", under({"method": "streaming"}), "--model", str(tmp_path), "--json")
    (found,) = json.loads(result.stdout)["expected"]
    assert (sparse, dense) == (found["sparse"], found["dense"])
    assert (0 if sparse else 1) == result.exit_code


def test_a_pooling_model_has_its_rows_read(tmp_path: Path) -> None:
    table = under({"method": "streaming", "skip_unread": True})
    refused(
        invoke("vllm-check", table, "--model", model(tmp_path, architectures=["LlamaModel"])),
        "sparseprefill.skip_unread is true, but a pooling model reads all rows",
    )
    assert 0 == invoke("vllm-check", table, "--model", str(CHECKPOINT)).exit_code


def test_chunks_that_are_too_short_for_the_method(tmp_path: Path) -> None:
    result = invoke("vllm-check", under({**STREAMING, "chunk": 64}), "--model", model(tmp_path))
    assert "  6 dense: min_query is 128, but no chunk has more than 64 tokens (chunk)" in result.stdout.splitlines()


@pytest.mark.parametrize(
    ("value", "right"),
    [("other", "other,sparseprefill"), ("", "sparseprefill"), ("a, sparseprefill", "a,sparseprefill")],
)
def test_an_environment_that_leaves_the_plugin_out(value: str, right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM splits the value at commas, and nothing else."""
    monkeypatch.setenv("VLLM_PLUGINS", value)
    words = f"VLLM_PLUGINS is {value!r}, which leaves sparseprefill out: set VLLM_PLUGINS={right}, or unset it"
    refused(invoke("vllm-check", under(STREAMING), "--model", str(CHECKPOINT)), words)
    monkeypatch.setenv("VLLM_PLUGINS", right)
    assert 0 == invoke("vllm-check", under(STREAMING), "--model", str(CHECKPOINT)).exit_code


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    given = under(STREAMING)
    refused(invoke("vllm-check", given, "--model", str(tmp_path)), "config.json; pass a folder of a model")
    folder = model(tmp_path, model_type="nobody-knows")
    refused(invoke("vllm-check", given, "--model", folder), "knows no model_type 'nobody-knows'")
