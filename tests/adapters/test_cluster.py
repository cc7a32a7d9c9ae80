"""Clustering of heads: captured maps, the autoencoder, groups, and the command on the embedded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sparseprefill.adapters.cli.commands import app
from sparseprefill.adapters.demo.model import CLUSTERS, PARAMETERS, load_model
from sparseprefill.adapters.demo.tasks import key_value_prompts
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.huggingface.identity import identity
from sparseprefill.adapters.huggingface.reader import Reader
from sparseprefill.plugins.share_prefill import TABLE, autoencoder, clustering
from sparseprefill.plugins.share_prefill.table import ClusterTable, Settings
from torch import Tensor
from typer.testing import CliRunner, Result

import sparseprefill as sp
from helpers.hf_models import build
from sparseprefill import structure

from .test_cli import refused

pytestmark = pytest.mark.usefixtures("_one_tokenizer")
SMALL = ("--tokens", "512", "--block", "32", "--samples", "1", "--epochs", "20", "--device", "cpu")


def reader(model: Any) -> Reader:
    return Reader(model, identity(model.get_decoder()))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["cluster", *arguments])


def kinds() -> Tensor:
    """``[8, 24, 24]``: four maps with mass in the first column, four on the diagonal, each a little different."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(8, 24, 24, generator=generator) * 0.2
    noise[:4, :, 0] += 3
    noise[4:, range(24), range(24)] += 3
    maps = noise.tril()
    return maps / maps.sum(-1, keepdim=True)


def test_captured_maps_are_the_models_attention(embedded: Any, embedded_tokenizer: Any) -> None:
    """Rows sum to 1, nothing lies in the future, and a block is the mean over rows of the attention's sum."""
    ids = key_value_prompts(embedded_tokenizer, 256, 1, 3)
    maps = clustering.block_maps(reader(embedded), ids, 64)
    assert dict.fromkeys(range(6), (1, 4, 4, 4)) == {layer: tuple(one.shape) for layer, one in maps.items()}
    stock = load_model(torch.float32)
    stock.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = stock(torch.tensor(ids), output_attentions=True).attentions
    for layer, truth in enumerate(attentions):
        blocks = truth.unflatten(3, (4, 64)).sum(4).unflatten(2, (4, 64)).mean(3)
        torch.testing.assert_close(blocks, maps[layer], rtol=1e-3, atol=1e-5)


def test_the_network_is_that_of_table_3() -> None:
    layers = [type(layer).__name__ for layer in autoencoder.Autoencoder(32).encoder]
    assert layers == ["Conv2d", "ReLU", "MaxPool2d", "Conv2d", "ReLU", "MaxPool2d", "Flatten", "Linear"]
    net = autoencoder.Autoencoder(48, latent=7)
    x = torch.rand(2, 1, 48, 48)
    assert tuple(net.encoder(x).shape) == (2, 7)
    assert x.shape == net(x).shape


@pytest.mark.parametrize(("blocks", "size"), [(3, 16), (16, 16), (17, 32), (300, 256)])
def test_maps_are_scaled_to_what_the_network_takes(blocks: int, size: int) -> None:
    x = autoencoder.scaled(torch.rand(2, blocks, blocks).tril() / blocks)
    assert (2, 1, size, size) == tuple(x.shape)
    assert bool((x.amax(-1) == 1).all())
    assert bool((x >= 0).all())


def test_two_kinds_of_heads_are_two_clusters() -> None:
    maps = kinds()
    codes, error = autoencoder.compress(maps.repeat(2, 1, 1), epochs=60, latent=8)
    again, _ = autoencoder.compress(maps.repeat(2, 1, 1), epochs=60, latent=8)
    assert torch.equal(codes, again)
    assert error < 0.2
    found = clustering.features(codes.unflatten(0, (2, 8)))
    chosen = clustering.labels(found, threshold=2.0, min_size=3)
    assert chosen == [0, 0, 0, 0, 1, 1, 1, 1]
    assert clustering.labels(found, threshold=0.0, min_size=2) == [-1] * 8
    assert clustering.labels(found, threshold=1e9, min_size=5) == [0] * 8
    similar = clustering.similarity(maps, 0.5)
    assert bool((similar.diagonal() == 1).all())
    assert float(similar[:4, :4].min()) > float(similar[:4, 4:].max())


def test_without_two_heads_of_a_kind_no_mean_is_told() -> None:
    assert clustering._mean(torch.ones(0)) is None
    assert clustering._mean(torch.tensor([0.25, 0.75])) == 0.5


@pytest.mark.gpu
def test_recorded_steps_train_as_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """35 maps in batches of 16: the last batch of an epoch is no recorded one."""
    maps = kinds().repeat(5, 1, 1)[:35]
    found, error = autoencoder.compress(maps, epochs=20, latent=8, device="cuda")
    monkeypatch.setattr(autoencoder.Training, "record", lambda training: None)
    wanted, other = autoencoder.compress(maps, epochs=20, latent=8, device="cuda")
    assert error == pytest.approx(other, rel=1e-2)
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)


def test_heads_that_are_all_alike() -> None:
    codes = torch.ones(2, 3, 4)
    assert tuple(clustering.features(codes).shape) == (3, 0)
    assert clustering.labels(clustering.features(codes), 1.0, 2) == [0, 0, 0]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedded: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*SMALL, "--min-size", "2", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["output"], facts["model"]) == ("clusters.json", "embedded")
    table = TABLE.read("clusters.json")
    heads = [head for heads in (*table.clusters, table.noise) for head in heads]
    assert sorted(heads) == [(layer, head) for layer in range(6) for head in range(4)]
    assert all(len(one) >= 2 for one in table.clusters)
    table.check_model(identity(embedded.get_decoder()))


def test_heads_of_layers_with_a_window_are_noise() -> None:
    """No method runs there, and every head must have its place."""
    model = build("gemma3", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
    ids = torch.randint(1, 96, (2, 256), generator=torch.Generator().manual_seed(0)).tolist()
    made = clustering.clustered(reader(model), ids, Settings(block=16, epochs=2, min_size=2, threshold=1e9))
    assert made.measured == "8 heads"
    assert isinstance(made.table, ClusterTable)
    assert made.table.noise == tuple((layer, head) for layer in (0, 2) for head in range(4))
    assert made.table.clusters == (tuple((layer, head) for layer in (1, 3) for head in range(4)),)
    assert "layers [0, 2] run without a method" in made.remarks[-1]
    clusters = structure.unstructure(made.table)
    with (
        torch.inference_mode(),
        attach(model, "share-prefill", clusters=clusters, block=16, min_query=16, strict=True, gate=None) as handle,
    ):
        model(torch.tensor(ids[:1]))
    assert [one.mode for one in handle.report().layers] == ["window", "sparse", "window", "sparse"]


def test_a_model_of_windows_alone_has_no_maps() -> None:
    model = build("mistral-sliding")
    with pytest.raises(sp.UnsupportedCallError, match="no layer has a block map"):
        clustering.block_maps(reader(model), [list(range(1, 90))], 16)


def test_a_table_without_clusters_is_told(tmp_path: Path) -> None:
    arguments = (*SMALL, "--min-size", "100", "--output", str(tmp_path / "clusters.json"))
    words = "no two heads of this model look alike"
    assert json.loads(run(*arguments, "--json").stdout)["useless"] == words
    shown = run(*arguments).stdout
    assert f"the method can do nothing with this table: {words}" in " ".join(shown.split())
    assert "nan" not in shown


def test_what_the_command_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, words in (
        (("--output", "nowhere/a.json"), "there is no folder"),
        (("--tokens", "50000", "--device", "cpu"), "reads at most"),
        (("--model", str(tmp_path / "nothing"), "--device", "cpu"), "--model"),
    ):
        refused(run(*arguments), words)


def test_the_shipped_table_fits_the_embedded_model(embedded: Any, embedded_tokenizer: Any) -> None:
    table = TABLE.read(CLUSTERS)
    table.check_model(identity(embedded.get_decoder()))
    assert len(table.clusters) >= 2
    ids = torch.tensor(key_value_prompts(embedded_tokenizer, 512, 1, 5))
    with (
        torch.inference_mode(),
        attach(embedded, "share-prefill", strict=True, **PARAMETERS["share-prefill"]) as handle,
    ):
        embedded(ids, logits_to_keep=1)
    assert all(layer.mode == "sparse" for layer in handle.report().layers)


def test_a_table_of_another_model_is_refused_when_attaching(embedded: Any) -> None:
    facts = json.loads(CLUSTERS.read_text())
    facts["model"]["digest"] = "0" * 16
    with pytest.raises(sp.ParameterError, match=r"another model: model.digest is '0000"):
        attach(embedded, "share-prefill", clusters=facts)
    with pytest.raises(sp.AttachError, match="sparseprefill cluster --model PATH"):
        attach(embedded, "share-prefill", strict=True)
