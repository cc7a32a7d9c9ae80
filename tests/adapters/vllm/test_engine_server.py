"""The OpenAI-compatible server, as a user starts it: processes of its own, one completion, metrics, and its end."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sparseprefill as sp

from ..test_cli import invoke
from . import engine, models
from .engine import PATIENCE
from .server import Server, started

pytestmark = [engine.NEEDED, pytest.mark.slow]
SPARSE = {
    "method": "streaming",
    "gate": False,
    "parameters": {"sink": 32, "window": 64, "block": 32},
    "tail": 0,
    "log_level": "debug",
    "log_interval": 1,
    "measure": True,
    "profiles": {
        "all": {"method": "dense", "gate": False},
        "wide": {"method": "streaming", "gate": False, "parameters": {"sink": 32, "window": 256, "block": 32}},
    },
}
TEMPLATE = "{% for one in messages %}{{ one.content }}{% endfor %}"


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """In the environment that a test asks for; by default one in which it can be asked everything."""
    (tmp_path / "metrics").mkdir()
    more = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics"), "VLLM_PLUGINS": "sparseprefill"}
    model = models.save("llama", tmp_path / "llama")
    flags = (
        *("--attention-backend", "CUSTOM", "--additional-config", json.dumps({"sparseprefill": SPARSE})),
        *("--worker-extension-cls", "sparseprefill.adapters.vllm.worker.ReportExtension"),
        "--trust-request-chat-template",
    )
    with started(model, tmp_path / "log.txt", *flags, **getattr(request, "param", more)) as made:
        made.wait()
        yield made


def test_a_completion_with_the_plugin_on(server: Server) -> None:
    body = {"model": "tiny", "prompt": models.prompt(600), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = json.loads(server.text("/v1/completions", body))
    assert 4 == answer["usage"]["completion_tokens"]
    said = refused(server, {**body, "vllm_xargs": {"sparseprefill": "quick"}})
    assert "sparseprefill is 'quick', which is not a profile of this engine. Known: all, off, wide" in said
    for name in ("off", "all", "wide"):
        answer = json.loads(server.text("/v1/completions", {**body, "vllm_xargs": {"sparseprefill": name}}))
        assert 4 == answer["usage"]["completion_tokens"]
    metrics = server.text("/metrics")
    for profile in ("", "wide"):
        own = {"method": "streaming", "profile": profile}
        assert 1 == value(metrics, "prefill_chunks_total", **own, mode="sparse", worker="0")
    assert 600 == value(metrics, "prefill_tokens_total", method="streaming", mode="dense", model_name="tiny")
    asked = "the request asks for it (sparseprefill: off)"
    assert 1 == value(metrics, "dense_chunks_total", profile="", code="off", reason=asked)
    for profile in ("", "all", "wide"):
        assert 1 == value(metrics, "info", profile=profile, gate="none", version=sp.__version__)
    assert 3 == value(metrics, "info"), "of one worker"
    assert [1, 1, 1] == [
        value(metrics, "prefill_calls_total", profile=profile, mode="sparse", layers="2")
        for profile in ("", "all", "wide")
    ]
    assert 1 == value(metrics, "density_count", profile="", layers="2")
    assert 4 == value(metrics, "recall_count", profile="", layers="2"), "the heads of the first prefill"
    assert 0 < value(metrics, "pairs_total", method="streaming", kind="computed", layers="0")
    told = invoke("vllm-report", server.url)
    assert 0 == told.exit_code, told.stderr
    assert "streaming on LlamaForCausalLM (dense: CPU_ATTN" in told.stdout
    assert "profile all\ndense on LlamaForCausalLM" in told.stdout
    server.says(r"prefill chunks of the last \d+ s: \d sparse, \d dense")
    log = server.log.read_text()
    assert "sparseprefill: streaming for prefill chunks of 128 tokens and more of LlamaForCausalLM" in log
    assert re.search(r"layer +2 +sparse +1 calls  1 x 600 queries, 600 keys  density 0\.\d+", log)
    family = children(server.process.pid)
    assert family
    server.process.terminate()
    assert 0 == server.process.wait(PATIENCE)
    end = time.monotonic() + PATIENCE
    while any(map(alive, family)) and time.monotonic() < end:
        time.sleep(0.2)
    assert [] == [pid for pid in family if alive(pid)]


@pytest.mark.parametrize("server", [{}], indirect=True)
def test_what_a_server_was_not_started_with_is_said(server: Server) -> None:
    body = {"model": "tiny", "prompt": models.prompt(300), "max_tokens": 2, "temperature": 0}
    server.text("/v1/completions", body)
    check_doors(server, body)
    assert "sparseprefill:" not in server.text("/metrics")
    assert "set PROMETHEUS_MULTIPROC_DIR to an empty folder before it starts" in server.log.read_text()
    told = invoke("vllm-report", server.url)
    assert 1 == told.exit_code
    assert "start the server with VLLM_PLUGINS=sparseprefill" in told.stderr


def check_doors(server: Server, body: dict[str, Any]) -> None:
    """What is asked for is carried by these endpoints, and refused where they do not read it."""
    prompt, off = body["prompt"], {"sparseprefill": "off"}
    plain = {"model": "tiny", "max_tokens": 2, "temperature": 0}
    talk = {**plain, "messages": [{"role": "user", "content": "w5 " * 200}]}
    doors: dict[str, dict[str, Any]] = {
        "/v1/completions": {**plain, "prompt": prompt},
        "/v1/messages": talk,
        "/v1/chat/completions": {**talk, "chat_template": TEMPLATE},
        "/inference/v1/generate": {"token_ids": prompt, "sampling_params": {"max_tokens": 2}},
    }
    for path, given in doors.items():
        for wrong in (off, {"custom_params": off}, {"sparsprefill": "off"}):
            assert f"which {path} does not read there: pass it as" in refused(server, {**given, **wrong}, path)
    unknown = {"vllm_xargs": {"sparseprefill": "quick"}}
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert "which is not a profile of this engine" in refused(server, {**doors[path], **unknown}, path)
    assert "drops where use_beam_search is True" in refused(
        server, {**doors["/v1/completions"], "vllm_xargs": off, "use_beam_search": True}
    )
    assert "leave it out, or ask /v1/completions" in refused(server, {**talk, "vllm_xargs": off}, "/generative_scoring")
    assert json.loads(server.text("/tokenize", {"model": "tiny", "prompt": "w5 w6", **off}))["tokens"]


def value(metrics: str, series: str, **labels: str) -> float:
    """The sum of a series of ours over what has these labels."""
    lines = re.findall(rf"^sparseprefill:{series}\{{(.*)\}} (\S+)$", metrics, re.MULTILINE)
    return sum(float(x) for have, x in lines if all(f'{name}="{text}"' in have for name, text in labels.items()))


def refused(server: Server, body: dict[str, Any], path: str = "/v1/completions") -> str:
    """What a server says to a request that it does not take."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.text(path, body)
    with caught.value as answer:
        assert 400 == answer.code
        return str(json.loads(answer.read())["error"]["message"])


def children(parent: int) -> list[int]:
    """Process ids below a process."""
    found: list[int] = []
    for entry in Path(f"/proc/{parent}/task").glob("*/children"):
        for pid in map(int, entry.read_text().split()):
            found += [pid, *children(pid)]
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and waits for its parent does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
