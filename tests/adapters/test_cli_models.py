"""Models that cannot be read, or that no method serves: one line with what and a remedy, in every command."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import logging
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sparseprefill.adapters.cli.group import CommandError
from sparseprefill.adapters.cli.loading import reading
from transformers import PreTrainedModel

from helpers.harness_tasks import need_harness

from .test_cli import invoke, refused

SIZES: dict[str, Any] = {
    **{"vocab_size": 2048, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "max_position_embeddings": 1024},
}
AUTO_MAP = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X", "AutoTokenizer": ["x.X", None]}
LOST = "model.layers.0.mlp.up_proj.weight"
Change = Callable[[Path], Any]


def put(name: str, **values: Any) -> Change:
    """Changes fields of a file."""
    return lambda at: (at / name).write_text(json.dumps({**json.loads((at / name).read_text()), **values}))


def text(name: str, written: str | bytes) -> Change:
    return lambda at: (at / name).write_bytes(written if isinstance(written, bytes) else written.encode())


def without(pattern: str) -> Change:
    def changed(at: Path) -> None:
        for one in at.glob(pattern):
            one.unlink()

    return changed


def cut(name: str) -> Change:
    return lambda at: (at / name).write_bytes((at / name).read_bytes()[: (at / name).stat().st_size // 2])


def both(*changes: Change) -> Change:
    return lambda at: [one(at) for one in changes]


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    def changed(at: Path) -> None:
        found = load_file(at / "model.safetensors")
        change(found)
        save_file(found, at / "model.safetensors", {"format": "pt"})

    return changed


def pickled(at: Path) -> None:
    (at / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(1000, dtype=torch.float32, device="cpu")}, at / "pytorch_model.bin")
    cut("pytorch_model.bin")(at)


def sharded(at: Path) -> None:
    """Two shards, of which the second is cut short."""
    found = load_file(at / "model.safetensors")
    (at / "model.safetensors").unlink()
    names = [f"model-0000{index}-of-00002.safetensors" for index in (1, 2)]
    places = {name: names[index % 2] for index, name in enumerate(found)}
    for shard in names:
        save_file({name: x for name, x in found.items() if places[name] == shard}, at / shard, {"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (at / "model.safetensors.index.json").write_text(json.dumps(index))
    cut(names[1])(at)


BROKEN: dict[str, tuple[Change, tuple[str, ...]]] = {
    "cut weights": (cut("model.safetensors"), ("its model.safetensors is cut short or holds no weights", "download")),
    "cut shard": (sharded, ("its model-00002-of-00002.safetensors is cut short",)),
    "lost shard": (both(sharded, without("model-00001*")), ("model-00001-of-00002.safetensors", "download")),
    "empty weights": (text("model.safetensors", ""), ("its model.safetensors is cut short",)),
    "pointer": (
        text("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"),
        ("is a pointer of Git LFS", "git lfs pull"),
    ),
    "no weights": (without("model.safetensors"), ("no file named model.safetensors", "download")),
    "cut pickle": (pickled, ("its pytorch_model.bin is cut short",)),
    "foreign pickle": (
        both(without("model.safetensors"), text("pytorch_model.bin", pickle.dumps({"a": Path("b")}))),
        ("its pytorch_model.bin is cut short or holds no weights",),
    ),
    "index": (
        both(sharded, text("model.safetensors.index.json", "{")),
        ("its model.safetensors.index.json is not JSON", "download that file anew"),
    ),
    "lost tensor": (
        tensors(lambda found: found.pop(LOST)),
        (f"lack 1 of the tensors of LlamaForCausalLM, such as {LOST}",),
    ),
    "not finite": (
        tensors(lambda found: found["model.norm.weight"].fill_(torch.nan)),
        ("gives logits that are not finite", "pass a causal language model"),
    ),
    "config is no JSON": (text("config.json", "{"), ("not a valid JSON file", "download it anew")),
    "config is null": (text("config.json", "null"), ("NoneType", "compare config.json")),
    "config is empty": (text("config.json", "{}"), ("names no model_type", "pass a folder that save_pretrained wrote")),
    "type": (put("config.json", model_type="llamma"), ("knows no model_type 'llamma'", "update transformers")),
    "words for layers": (put("config.json", num_hidden_layers="two"), ("'num_hidden_layers'", "compare config.json")),
    "no layers": (put("config.json", num_hidden_layers=0), ("LlamaForCausalLM has no attention", "_layers = 0")),
    "no heads": (put("config.json", num_attention_heads=0), ("ZeroDivisionError", "compare config.json")),
    "heads": (put("config.json", num_attention_heads=3), ("hidden size (32) is not a multiple", "compare config.json")),
    "width": (put("config.json", hidden_size=64), ("its weights have other sizes than its config.json says",)),
    "layers": (put("config.json", num_hidden_layers=3), ("lack 9 of the tensors of LlamaForCausalLM",)),
    "activation": (put("config.json", hidden_act="none such"), ("KeyError: 'none such'", "config.json")),
    "rope": (put("config.json", rope_parameters={"rope_type": "none such"}), ("KeyError: 'none such'",)),
    "dtype": (put("config.json", dtype="float99"), ("float99", "compare config.json")),
    "quantised": (
        put("config.json", quantization_config={"quant_method": "aqlm"}),
        ("`aqlm` quantization requires AQLM: `pip install aqlm",),
    ),
    "quantised, a list": (put("config.json", quantization_config=[4]), ("'list' object", "compare config.json")),
    "own code": (put("config.json", model_type="x", auto_map=AUTO_MAP), ("code of its own (auto_map)", "pass a model")),
    "own tokenizer": (
        put("tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class="X"), ("code of its own (auto_map)",)
    ),
    "no tokenizer": (without("token*"), ("holds no tokenizer", "put tokenizer.json")),
    "cut tokenizer": (cut("tokenizer.json"), ("its tokenizer.json is not JSON", "download that file anew")),
    "empty tokenizer": (text("tokenizer.json", "{}"), ("KeyError: 'added_tokens'", "put the tokenizer's files")),
    "tokenizer is a list": (text("tokenizer_config.json", "[]"), ("'list' object", "put the tokenizer's files")),
    "adapter": (
        both(without("config.json"), text("adapter_config.json", '{"base_model_name_or_path": "x"}')),
        ("holds an adapter of PEFT", "merge it into its model"),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def tried(at: Path) -> Any:
    return invoke("try", str(at), "--tokens", "512", "--seconds", "1", "--threads", "1", "--device", "cpu")


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_folder_is_one_line(what: str, folder: Path, tmp_path: Path) -> None:
    change, words = BROKEN[what]
    shutil.copytree(folder, tmp_path / "m")
    change(tmp_path / "m")
    refused(tried(tmp_path / "m"), f"error: MODEL {tmp_path / 'm'}: ", *words)


def made(model: PreTrainedModel, at: Path, tokenizer: Any) -> Path:
    model.save_pretrained(at)
    tokenizer.save_pretrained(at)
    return at


NOT_SERVED: dict[str, tuple[Callable[[], Any], str]] = {
    "mamba": (
        lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=2048, hidden_size=32, num_hidden_layers=2, state_size=8)
        ),
        "MambaForCausalLM has no attention (its configuration says num_attention_heads = None), and so nothing to gain",
    ),
    "encoder": (
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
        "BertLMHeadModel has no attention layer to attach to: the layer is not causal; pass a causal language model",
    ),
    "encoder without a head": (
        lambda: transformers.DistilBertModel(
            transformers.DistilBertConfig(vocab_size=2048, dim=32, hidden_dim=48, n_layers=2, n_heads=4)
        ),
        "transformers has no causal language model of DistilBert",
    ),
    "encoder and decoder": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=2048, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
        ),
        "transformers has no causal language model of T5",
    ),
    "no head": (lambda: transformers.LlamaModel(transformers.LlamaConfig(**SIZES)), "such as lm_head.weight"),
}


@pytest.mark.parametrize("what", NOT_SERVED)
def test_a_model_that_no_method_serves_is_one_line(what: str, tmp_path: Path, embedded_tokenizer: Any) -> None:
    model, words = NOT_SERVED[what]
    at = made(model(), tmp_path / "m", embedded_tokenizer)
    result = invoke("try", str(at), "--tokens", "400", "--seconds", "1", "--threads", "1", "--device", "cpu")
    refused(result, f"error: MODEL {at}: ", words)


COMMANDS = {
    "try": "try {} --tokens 512 --seconds 1",
    "compare": "compare --model {} --tokens 512 --count 1",
    "demo": "demo --model {} --tokens 1024 --questions 1 --layer 0",
    "fit": "fit --model {} --tokens 512 --count 1",
    "evaluate": "evaluate --model {} --method bfla --tokens 1024 --limit 1 --tasks niah_single_1",
    "anchors": "anchors --model {} --tokens 512 --samples 1",
    "cluster": "cluster --model {} --tokens 512 --samples 1",
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("what", ["cut weights", "quantised", "cut tokenizer", "words for layers", "own code", "mamba"])
def test_every_command_refuses_alike(
    command: str, what: str, folder: Path, tmp_path: Path, embedded_tokenizer: Any
) -> None:
    if command == "evaluate":
        need_harness()
    if what in NOT_SERVED:
        model, said = NOT_SERVED[what]
        made(model(), tmp_path / "m", embedded_tokenizer)
        words: tuple[str, ...] = (said,)
    else:
        change, words = BROKEN[what]
        shutil.copytree(folder, tmp_path / "m")
        change(tmp_path / "m")
    option = "MODEL" if command == "try" else "--model"
    given = COMMANDS[command].format(tmp_path / "m").split()
    refused(invoke(*given, "--device", "cpu"), f"error: {option} {tmp_path / 'm'}: ", *words)


@pytest.mark.parametrize("what", ["config is null", "words for layers", "own code", "no heads"])
def test_a_check_for_vllm_refuses_alike(what: str, folder: Path, tmp_path: Path) -> None:
    change, words = BROKEN[what]
    shutil.copytree(folder, tmp_path / "m")
    change(tmp_path / "m")
    refused(invoke("vllm-check", '{"sparseprefill": {"method": "bfla"}}', "--model", str(tmp_path / "m")), *words)


def test_a_tokenizer_of_another_model(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    put("config.json", vocab_size=2000)(tmp_path / "m")
    tensors(lambda found: found.update({name: x[:2000].clone() for name, x in found.items() if len(x) == 2048}))(
        tmp_path / "m"
    )
    refused(tried(tmp_path / "m"), "its tokenizer has 2,048 tokens, and the model 2,000; put the tokenizer's files")


def test_a_name_that_is_too_long_for_a_file() -> None:
    refused(invoke("try", "a" * 300), "there is no such folder, and by that name:")
    refused(invoke("try", "/" + "a" * 300), "there is no such folder; pass the folder")


def test_what_transformers_says_follows_a_success_alone(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("transformers.anything")

    def fails(error: Exception) -> None:
        with reading("m", "--model", "weights"):
            logger.warning("a table")
            raise error

    with pytest.raises(CommandError, match="--model m: it cannot; check that"):
        fails(RuntimeError("it cannot. Not at all"))
    with pytest.raises(RuntimeError, match="out of memory"):
        fails(RuntimeError("out of memory"))
    assert [] == caplog.messages
    with reading("m", "--model", "weights") as said:
        logger.warning("a remark")
        warnings.warn("another", UserWarning, stacklevel=1)
    assert 2 == len(said)
    with pytest.warns(UserWarning, match="another"):
        said[1]()
