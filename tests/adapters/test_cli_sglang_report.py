"""`sparseprefill sglang-report`: what a server answers, and what to do where it does not."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from .test_cli import invoke, refused

REPORT = {"worker": "0", "text": "streaming on M\nlayer   0  sparse", "profiles": {"all": {"text": "dense on M"}}}


class Server:
    """Answers as it is told to; keeps what it was asked."""

    def __init__(self) -> None:
        self.status, self.body = 200, json.dumps({"internal_states": [{"sparseprefill": [REPORT]}]})
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                self.send_response(outer.status)
                self.end_headers()
                self.wfile.write(outer.body.encode())

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class calls it so
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


def test_the_report_is_printed(server: Server) -> None:
    result = invoke("sglang-report", server.url + "/")
    assert (0, "") == (result.exit_code, result.stderr)
    assert "streaming on M\nlayer   0  sparse\nprofile all\ndense on M\n" == result.stdout
    assert ["/server_info"] == server.asked


def test_as_json(server: Server) -> None:
    assert [REPORT] == json.loads(invoke("sglang-report", server.url, "--json").stdout)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, "{}", "refuses to answer (401)"),
        (500, "{}", "answers /server_info with 500"),
        (200, '{"internal_states": [{}]}', "start it with --prefill-attention-backend sparseprefill"),
        (200, "<html>", "answers, but not as SGLang does: check the address"),
        (200, '{"internal_states": [1]}', "answers, but not as SGLang does"),
    ],
)
def test_what_a_server_lacks_is_said(server: Server, status: int, body: str, words: str) -> None:
    server.status, server.body = status, body
    refused(invoke("sglang-report", server.url), server.url, words)


def test_a_server_that_is_not_there(server: Server) -> None:
    with_nobody = f"{server.url.rpartition(':')[0]}:1"
    refused(invoke("sglang-report", with_nobody, "--timeout", "5"), f"no server answers at {with_nobody}", "refused")
