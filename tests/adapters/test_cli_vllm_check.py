"""`sparseprefill vllm-check`: a configuration is judged without vLLM, a server, or a model's weights."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sparseprefill.adapters.demo.model import CHECKPOINT

from .test_cli import invoke, refused

STREAMING: dict[str, Any] = {"method": "streaming", "parameters": {"sink": 64, "window": 256}}
PROFILE = Path(__file__).parent / "vllm" / "embedded.profile.json"


def model(folder: Path, **changes: Any) -> str:
    """The configuration of the model that ships, with changes; no weights."""
    known = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**known, **changes}), encoding="utf-8")
    return str(folder)


def test_what_a_server_would_run(tmp_path: Path) -> None:
    table = {**STREAMING, "chunk": 256, "profiles": {"all": {"method": "dense"}}}
    given = tmp_path / "given.json"
    given.write_text(json.dumps({"sparseprefill": table}), encoding="utf-8")
    for config in (str(given), json.dumps(table)):
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


KINDS = ["sliding_attention", "full_attention", "linear_attention", "chunked_attention", "full_attention"]


def test_layers_that_stay_dense_are_named(tmp_path: Path) -> None:
    folder = model(tmp_path, layer_types=KINDS, num_hidden_layers=5, sliding_window=64)
    result = invoke("vllm-check", json.dumps(STREAMING), "--model", folder)
    assert 0 == result.exit_code
    lines = result.stdout.splitlines()
    assert "streaming in 2 of 4 layers" in lines, "the one of linear attention has no keys"
    assert "  1 dense: the layer has a sliding window" in lines
    assert "  1 dense: the layer attends in chunks" in lines
    strict = json.dumps({**STREAMING, "strict": True})
    refused(invoke("vllm-check", strict, "--model", folder), "strict: these layers would stay dense: layer 0")
    some = json.dumps({**STREAMING, "strict": True, "layers": [1, 4]})
    assert "streaming in 2 of 2 layers" in invoke("vllm-check", some, "--model", folder).stdout


@pytest.mark.parametrize(
    "changes", [{"layer_types": ["sliding_attention"] * 6, "sliding_window": 64}, {"kv_lora_rank": 512}], ids=str
)
def test_nothing_to_run_sparse_is_a_failure(changes: dict[str, Any], tmp_path: Path) -> None:
    result = invoke("vllm-check", json.dumps(STREAMING), "--model", model(tmp_path, **changes))
    assert 1 == result.exit_code
    assert "streaming in 0 of 6 layers" in result.stdout
    assert "error: nothing would run sparse" in result.stderr


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"method": "streeming"}', "sparseprefill.method: no method is named 'streeming'; did you mean 'streaming'"),
        (
            '{"method": "streaming", "parameters": {"sinc": 3}}',
            "sparseprefill.parameters.sinc is unknown; did you mean",
        ),
        ('{"method": "streaming", "min_qery": 3}', "sparseprefill.min_qery is unknown"),
        ('{"method": "streaming", "layers": [6]}', "sparseprefill.layers names 6: 6 layers"),
        (
            '{"method": "anchor-attention", "chunk": 100}',
            "sparseprefill.chunk is 100: sparseprefill (anchor-attention)",
        ),
        (
            '{"sparseprefill": {"method": "streaming", "profiles": {"a": {"method": "x"}}}}',
            "sparseprefill.profiles.a.method: no method is named 'x'",
        ),
        ("{", "{: is not JSON"),
        ("nowhere.json", "nowhere.json: No such file"),
    ],
)
def test_what_a_server_would_refuse(config: str, words: str) -> None:
    refused(invoke("vllm-check", config, "--model", str(CHECKPOINT)), words)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    given = json.dumps(STREAMING)
    refused(invoke("vllm-check", given, "--model", str(tmp_path)), "config.json; pass a folder of a model")
    folder = model(tmp_path, model_type="nobody-knows")
    refused(invoke("vllm-check", given, "--model", folder), "transformers cannot read its config.json")
