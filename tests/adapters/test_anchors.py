"""Anchor layers: what is captured of a model, how layers are chosen, and the command on the embedded model."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sparseprefill.adapters.cli.commands import app
from sparseprefill.adapters.demo.model import ANCHORS, PARAMETERS, load_model
from sparseprefill.adapters.demo.tasks import key_value_prompts
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.huggingface.identity import identity
from sparseprefill.adapters.huggingface.reader import Reader
from sparseprefill.plugins.kascade import TABLE, anchors
from sparseprefill.plugins.kascade.anchors import anchored
from sparseprefill.plugins.kascade.table import AnchorTable, Settings
from typer.testing import CliRunner, Result

import sparseprefill as sp

from .test_cli import refused

pytestmark = pytest.mark.usefixtures("_one_tokenizer")
SMALL = ("--tokens", "512", "--samples", "1", "--tile", "32", "--columns", "32", "--device", "cpu")


def reader(model: Any) -> Reader:
    return Reader(model, identity(model.get_decoder()))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["anchors", *arguments])


def test_sums_and_weights_are_those_of_the_models_own_attention(embedded: Any, embedded_tokenizer: Any) -> None:
    ids = key_value_prompts(embedded_tokenizer, 200, 1, 3)
    ((sums, weights),) = anchors.readings(reader(embedded), ids, 64)
    stock = load_model(torch.float32)
    stock.set_attn_implementation("eager")
    kept: dict[int, Any] = {}

    def keep(number: int, x: Any) -> None:
        kept.setdefault(number, []).append(x)

    for layer in stock.model.layers:
        number = layer.self_attn.layer_idx
        layer.register_forward_pre_hook(lambda _, args, n=number: keep(n, args[0]))
        layer.self_attn.register_forward_hook(lambda _, args, out, n=number: keep(n, out[0]))
    with torch.inference_mode():
        attentions = stock(torch.tensor(ids), output_attentions=True).attentions
    assert sorted(sums) == sorted(weights) == list(range(6))
    for layer, truth in enumerate(attentions):
        mass = truth[0].unflatten(0, (2, 2)).sum(1)  # [2, 200, 200]
        for number, first in enumerate(range(0, 200, 64)):
            rows = mass[:, first : first + 64].sum(1)
            before, inside = sums[layer].before[:, number], sums[layer].inside[:, number]
            torch.testing.assert_close(rows[:, :first], before[:, :first], rtol=1e-3, atol=1e-4)
            assert not bool(before[:, first:].any())
            torch.testing.assert_close(rows[:, first:].sum(-1), inside, rtol=1e-3, atol=1e-4)
        x, added = kept[layer]
        turned = 1 - torch.nn.functional.cosine_similarity(x, x + added, dim=-1).mean()
        assert float(turned) == pytest.approx(weights[layer], abs=1e-5)


def test_similarity_by_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    heads, tiles, n, k, tile = 3, 4, 40, 5, 10

    def made() -> anchors.LayerSums:
        before = torch.rand(heads, tiles, n, generator=generator)
        for t in range(tiles):
            before[:, t, t * tile :] = 0
        return anchors.LayerSums(before, torch.rand(heads, tiles, generator=generator))

    one, other = made(), made()
    found = anchors.similarity(anchors.TopKeys.of(one, k), other, anchors.TopKeys.of(other, k))
    for mine in range(heads):
        for theirs in range(heads):
            shares = []
            for t in range(tiles):
                inside, mass = float(other.inside[mine, t]), other.before[mine, t]
                taken = float(mass[one.before[theirs, t].topk(k).indices].sum())
                shares.append((taken + inside) / (float(mass.topk(k).values.sum()) + inside))
            assert min(shares) == pytest.approx(float(found[mine, theirs]), rel=1e-5)
    assert float(anchors.similarity(anchors.TopKeys.of(one, k), one, anchors.TopKeys.of(one, k)).diagonal().min()) == 1


@given(seed=st.integers(0, 9999), n=st.integers(1, 7), data=st.data())
def test_the_layers_are_those_of_an_exhaustive_search(seed: int, n: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, n))
    gain = torch.rand(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def value(chosen: tuple[int, ...]) -> float:
        return sum(float(gain[max(a for a in chosen if a <= layer), layer]) for layer in range(n))

    every = [(0, *rest) for rest in combinations(range(1, n), count - 1)]
    found, score = anchors.best(gain, count)
    assert found in every
    assert score == pytest.approx(max(map(value, every)))
    assert score == pytest.approx(value(found))


def test_heads_follow_those_that_serve_them_best() -> None:
    similar = torch.tensor([[0.5, 0.9, 0.1], [0.7, 0.7, 0.7], [0.2, 0.3, 0.3]])
    found = anchors.mapped(similar)
    assert found == (1, 1, 2)
    gain = anchors.ordered((3, 5), {(3, 3): torch.eye(3), (3, 5): similar, (5, 5): torch.eye(3)}, {3: 2.0, 5: 0.5})
    expected = torch.tensor([[2.0, 0.5 * (0.9 + 0.7 + 0.3) / 3], [0.0, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(expected, gain)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedded: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*SMALL, "--count", "2", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    table = TABLE.read("anchors.json")
    assert ("anchors.json", "embedded", list(table.anchors)) == (facts["output"], facts["model"], facts["anchors"])
    assert len(table.anchors) == 2
    assert table.anchors[0] == 0
    assert sorted(table.maps) == [layer for layer in range(6) if layer not in table.anchors]
    assert facts["scores"]["6"] == {"anchors": list(range(6)), "score": pytest.approx(1.0)}
    scores = [one["score"] for one in facts["scores"].values()]
    assert scores == sorted(scores)
    table.check_model(identity(embedded.get_decoder()))
    shown = run(*SMALL)
    assert shown.exit_code == 0, shown.output
    assert "chosen" in shown.output
    assert TABLE.read("anchors.json").anchors == (0,)  # one in seven


def test_what_the_command_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, words in (
        (("--output", "nowhere/a.json"), "there is no folder"),
        (("--tokens", "50000", "--device", "cpu"), "reads at most"),
        (("--tokens", "256", "--samples", "1", "--device", "cpu"), "pass longer ones than 256"),
        (("--model", str(tmp_path / "nothing"), "--device", "cpu"), "--model"),
    ):
        refused(run(*arguments), words)


def test_the_shipped_table_fits_the_embedded_model(embedded: Any, embedded_tokenizer: Any) -> None:
    table = TABLE.read(ANCHORS)
    table.check_model(identity(embedded.get_decoder()))
    ids = key_value_prompts(embedded_tokenizer, table.made["tokens"], table.made["samples"], 0)
    settings = Settings(count=table.made["count"], tile=table.made["tile"], columns=table.made["columns"])
    again = anchored(reader(embedded), ids[:2], settings)
    assert isinstance(again.table, AnchorTable)
    assert table.anchors == again.table.anchors
    with (
        torch.inference_mode(),
        attach(embedded, "kascade", strict=True, **PARAMETERS["kascade"]) as handle,
    ):
        embedded(torch.tensor(key_value_prompts(embedded_tokenizer, 512, 1, 5)), logits_to_keep=1)
    assert all(layer.mode == "sparse" for layer in handle.report().layers)


def test_a_table_of_another_model_is_refused_when_attaching(embedded: Any) -> None:
    facts = json.loads(ANCHORS.read_text())
    facts["model"]["digest"] = "0" * 16
    with pytest.raises(sp.ParameterError, match=r"another model: model.digest is '0000"):
        attach(embedded, "kascade", anchors=facts)
    with pytest.raises(sp.AttachError, match="sparseprefill anchors --model PATH"):
        attach(embedded, "kascade", strict=True)
