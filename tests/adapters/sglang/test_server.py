"""SGLang's HTTP server with the backend: answers, streams, refusals, report, metrics."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..vllm.models import save
from .engine import NEEDED, PATIENCE, end, environment, prompt

pytestmark = [NEEDED, pytest.mark.slow]
TABLE = {
    "method": "streaming",
    "parameters": {"sink": 16, "window": 64},
    "gate": False,
    "recall_every": 1,
    "log_interval": 1,
}
FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--served-model-name", "tiny"),
    *("--prefill-attention-backend", "sparseprefill", "--decode-attention-backend", "torch_native"),
    *(
        "--cuda-graph-backend-decode",
        "disabled",
        "--skip-server-warmup",
        "--enable-metrics",
    ),
    *("--max-total-tokens", "8192", "--chunked-prefill-size", "256", "--random-seed", "0", "--enable-metrics"),
)


class Server:
    """url: of its root. log: what it printed."""

    def __init__(self, url: str, log: Path) -> None:
        self.url, self._log = url, log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE) as answer:
            text: str = answer.read().decode()
        return text

    def post(self, path: str, **body: Any) -> tuple[int, str]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def complete(self, **more: Any) -> tuple[int, str]:
        usual = {"model": "tiny", "prompt": prompt(600), "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        return self.post("/v1/completions", **{**usual, **more})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    model = save("qwen3", folder / "qwen3")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "log.txt"
    command = [
        str(Path(sys.executable).with_name("sglang")),
        "serve",
        "--model-path",
        str(model),
        "--port",
        str(port),
        *FLAGS,
    ]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(TABLE), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    made = Server(f"http://127.0.0.1:{port}", log)
    try:
        wait(made, process)
        yield made
    finally:
        end(process)


def wait(server: Server, process: subprocess.Popen[Any]) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        assert process.poll() is None, server.log[-4000:]
        try:
            server.get("/health")
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise TimeoutError(server.log[-4000:])


def test_a_stream_says_what_a_plain_answer_says(server: Server) -> None:
    status, plain = server.complete()
    assert 200 == status, plain
    status, streamed = server.complete(stream=True)
    assert 200 == status
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: {")]
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    assert json.loads(plain)["choices"][0]["text"] == text
    assert len(events) > 1


def test_a_request_may_ask_for_sglang_s_own_attention(server: Server) -> None:
    status, answer = server.complete(custom_params={"sparseprefill": "off"})
    assert 200 == status, answer


@pytest.mark.parametrize(
    ("asked", "said"),
    [({"sparseprefill": "fast"}, "is not a profile of this engine"), ({"sparse-prefill": "off"}, "did you mean")],
)
def test_what_is_not_there_gets_status_400(server: Server, asked: dict[str, str], said: str) -> None:
    status, answer = server.complete(custom_params=asked)
    assert 400 == status
    assert said in answer
    assert 200 == server.complete()[0]


TALK = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "w5 " * 200}]}
ROWS = {"input_ids": prompt(300), "sampling_params": {"max_new_tokens": 2}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"model": "tiny", "input": "w5 " * 200, "max_output_tokens": 2}),
        ("/v1/messages", TALK),
        ("/v1/chat/completions", TALK),
        ("/v1/completions", {"model": "tiny", "prompt": prompt(300), "max_tokens": 2}),
        ("/generate", ROWS),
    ],
)
def test_what_is_asked_for_where_nobody_reads_it_gets_status_400(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    off = {"sparseprefill": "off"}
    wrong: list[dict[str, Any]] = [off, {"sparsprefill": "off"}, {"vllm_xargs": off}]
    if path in ("/v1/responses", "/v1/messages", "/generate"):
        wrong += [{"custom_params": off}, {"custom_params": {"sparseprefill": "fast"}}]
    for one in wrong:
        status, answer = server.post(path, **body, **one)
        assert 400 == status, answer
        assert f"which {path} does not read there" in json.loads(answer)["error"]["message"]


def test_sglang_s_own_endpoint_reads_it_among_the_sampling_parameters(server: Server) -> None:
    asked: dict[str, Any] = {**ROWS["sampling_params"], "custom_params": {"sparseprefill": "off"}}  # type: ignore[dict-item]
    assert 200 == server.post("/generate", **{**ROWS, "sampling_params": asked})[0]
    asked["custom_params"] = {"sparseprefill": "fast"}
    status, answer = server.post("/generate", **{**ROWS, "sampling_params": asked})
    assert 400 == status
    assert "is not a profile of this engine" in answer


def test_report_metrics_and_log(server: Server) -> None:
    server.complete(prompt=prompt(700, seed=4))
    server.complete(prompt=prompt(500, seed=4), custom_params={"sparseprefill": "off"})
    (state,) = json.loads(server.get("/server_info"))["internal_states"]
    (report,) = state["sparseprefill"]
    assert {"sparse"} == {layer["mode"] for layer in report["layers"]}
    metrics = server.get("/metrics")
    chunks = re.findall(r"^sparseprefill:prefill_chunks_total\{(.*)\} (\S+)$", metrics, flags=re.M)
    assert {'mode="sparse"', 'mode="dense"'} == set(re.findall(r'mode="\w+"', str(chunks)))
    assert all('model_name="tiny"' in labels and float(count) > 0 for labels, count in chunks)
    assert "sparseprefill:recall_bucket" in metrics
    (info,) = re.findall(r"^sparseprefill:info\{(.*)\} 1\.0$", metrics, flags=re.M)
    assert {'gate="none"', 'method="streaming"', 'steps="256"'} < set(info.split(","))
    until = time.monotonic() + PATIENCE
    while not re.search(r"sparseprefill: prefill chunks of the last \d+ s: \d+ sparse, \d+ dense", server.log):
        assert time.monotonic() < until, server.log[-4000:]
        time.sleep(0.2)
