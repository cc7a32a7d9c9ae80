"""`sparseprefill vllm-report` and `sglang-report`: what a server answers, and what to do where it does not."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from .test_cli import invoke, refused

VLLM, SGLANG = "vllm-report", "sglang-report"
REPORT = {"worker": "0", "text": "streaming on M\nlayer   0  sparse", "profiles": {"all": {"text": "dense on M"}}}
ANSWERS: dict[str, Any] = {
    VLLM: {"results": [REPORT]},
    SGLANG: {"internal_states": [{"sparseprefill": [REPORT]}]},
}
ASKED: dict[str, list[tuple[str, Any]]] = {
    VLLM: [("/sparseprefill/report", None)],
    SGLANG: [("/server_info", None)],
}
both = pytest.mark.parametrize("command", [VLLM, SGLANG])


class Server:
    """Answers as it is told to; keeps what it was asked, with the body of a POST."""

    def __init__(self) -> None:
        self.status, self.body, self.asked = 200, "", list[tuple[str, Any]]()
        self.absent: tuple[str, ...] = ()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                self.answer(json.loads(self.rfile.read(length)))

            def do_GET(self) -> None:
                self.answer(None)

            def answer(self, given: Any) -> None:
                outer.asked.append((self.path, given))
                self.send_response(404 if self.path in outer.absent else outer.status)
                self.end_headers()
                self.wfile.write(outer.body.encode())

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class calls it so
                """Silent."""

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.http.serve_forever)
    thread.start()
    yield made
    made.http.shutdown()
    thread.join()
    made.http.server_close()


@both
def test_the_report_is_printed(server: Server, command: str) -> None:
    server.body = json.dumps(ANSWERS[command])
    result = invoke(command, server.url + "/")
    assert (0, "") == (result.exit_code, result.stderr)
    assert "streaming on M\nlayer   0  sparse\nprofile all\ndense on M\n" == result.stdout
    assert ASKED[command] == server.asked


def test_a_vllm_without_endpoint_plugins(server: Server) -> None:
    server.body, server.absent = json.dumps(ANSWERS[VLLM]), ("/sparseprefill/report",)
    assert "streaming on M\n" in invoke(VLLM, server.url).stdout
    assert ("/collective_rpc", {"method": "sparseprefill_report", "timeout": 30.0}) == server.asked[-1]


def test_every_worker_is_named(server: Server) -> None:
    server.body = json.dumps({"results": [{**REPORT, "profiles": {}}, {"worker": "1", "text": "more"}]})
    lines = invoke(VLLM, server.url).stdout.splitlines()
    assert ["worker 0", "streaming on M", "layer   0  sparse", "worker 1", "more"] == lines


def test_profiles_that_are_no_table_are_left_out(server: Server) -> None:
    server.body = json.dumps({"results": [{**REPORT, "profiles": []}]})
    assert "streaming on M\nlayer   0  sparse\n" == invoke(VLLM, server.url).stdout


@both
def test_as_json(server: Server, command: str) -> None:
    server.body = json.dumps(ANSWERS[command])
    assert [REPORT] == json.loads(invoke(command, server.url, "--json").stdout)


@pytest.mark.parametrize(
    ("command", "status", "body", "words"),
    [
        (VLLM, 404, "{}", "has no /sparseprefill/report: start the server with VLLM_PLUGINS=sparseprefill"),
        (VLLM, 500, "{}", "--worker-extension-cls sparseprefill.adapters.vllm.worker.ReportExtension"),
        (VLLM, 401, "{}", "refuses to answer (401)"),
        (
            VLLM,
            200,
            '{"results": [{}]}',
            "does not run prefill through sparseprefill: start it with --attention-backend",
        ),
        (VLLM, 200, '{"results": []}', "does not run prefill through sparseprefill"),
        (VLLM, 200, "", "answers, but not as vLLM does: check the address"),
        (VLLM, 200, "<html>", "answers, but not as vLLM does"),
        (VLLM, 200, "[]", "answers, but not as vLLM does"),
        (SGLANG, 401, "{}", "refuses to answer (401)"),
        (SGLANG, 500, "{}", "answers /server_info with 500"),
        (SGLANG, 200, '{"internal_states": [{}]}', "start it with --prefill-attention-backend sparseprefill"),
        (SGLANG, 200, "<html>", "answers, but not as SGLang does: check the address"),
        (SGLANG, 200, '{"internal_states": [1]}', "answers, but not as SGLang does"),
        (SGLANG, 200, '{"internal_states": [{"sparseprefill": null}]}', "answers, but not as SGLang does"),
        (SGLANG, 200, '{"internal_states": [{"sparseprefill": [3]}]}', "does not run prefill through sparseprefill"),
        (
            VLLM,
            200,
            '{"results": [{"text": "a", "profiles": {"b": 3}}]}',
            "does not run prefill through sparseprefill",
        ),
    ],
)
def test_what_a_server_lacks_is_said(server: Server, command: str, status: int, body: str, words: str) -> None:
    server.status, server.body = status, body
    refused(invoke(command, server.url), server.url, words)


@pytest.mark.parametrize(
    ("command", "body", "variable"),
    [(VLLM, '{"results": [{}]}', "VLLM_PLUGINS"), (SGLANG, '{"internal_states": [{}]}', "SGLANG_PLUGINS")],
)
def test_a_server_that_may_not_load_the_plugin(
    server: Server, command: str, body: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.body = body
    monkeypatch.delenv(variable, raising=False)
    refused(invoke(command, server.url), f"; {variable} of its environment, if set, must name sparseprefill\n")
    monkeypatch.setenv(variable, "other")
    words = f"(here {variable} is 'other', which leaves sparseprefill out: set {variable}=other,sparseprefill, or unset"
    refused(invoke(command, server.url), words)


@both
def test_a_server_that_is_not_there(server: Server, command: str) -> None:
    with_nobody = f"{server.url.rpartition(':')[0]}:1"
    refused(invoke(command, with_nobody, "--timeout", "5"), f"no server answers at {with_nobody}", "refused")


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host/x", "http://", "http://host:port"])
def test_what_is_no_address(url: str) -> None:
    refused(invoke(VLLM, url), "http://127.0.0.1:8000")
