"""A door in front of two of vLLM's servers, one that reads prompts and one that answers: ``python -m lab.handing
--prefill URL --decode URL`` (from tests/), for `sparseprefill replay`.

The first server reads a prompt, answers with one token and says where its keys lie; the second one fetches them over
``NixlConnector`` and answers. Fleets have a router for this; here it is as little as a comparison needs.
"""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated, Any

import typer
from attrs import frozen
from sparseprefill.adapters.cli.group import CommandError

from lab.files import command

COMPLETIONS = "/v1/completions"
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a prefill server is asked for beside its token: where a decode server finds the keys."""
app = command("Let one server of vLLM read prompts and another one answer.")


@frozen
class Machine:
    """A server's address."""

    url: str

    @contextmanager
    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Iterator[http.client.HTTPResponse]:
        """Its answer, to be read in the block; ConnectionError where there is none."""
        parts = urllib.parse.urlsplit(self.url)
        with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)) as connection:
            try:
                if body is None:
                    connection.request("GET", path)
                else:
                    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
                answer = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise ConnectionError(f"no server answers at {self.url} ({error})") from error
            with answer:
                yield answer


@frozen
class Pair:
    """prefill: reads prompts, and holds their keys until they are fetched. decode: fetches them, and answers."""

    prefill: Machine
    decode: Machine

    @contextmanager
    def complete(self, body: Mapping[str, Any]) -> Iterator[http.client.HTTPResponse]:
        """The decode server's answer, or the prefill server's where it refuses."""
        alone = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        with self.prefill.ask(COMPLETIONS, {**alone, "max_tokens": 1, "kv_transfer_params": ASKED}) as read:
            if read.status != 200:
                yield read
                return
            where = json.loads(read.read()).get("kv_transfer_params")
        if not where:
            raise ConnectionError(f"{self.prefill.url} hands no keys over: start it with --kv-transfer-config")
        with self.decode.ask(COMPLETIONS, {**body, "kv_transfer_params": where}) as answer:
            yield answer


def door(pair: Pair, port: int) -> ThreadingHTTPServer:
    """A server in front of both, not yet serving. Its models are the decode server's, its counters the other's."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._hand((pair.prefill if self.path == "/metrics" else pair.decode).ask(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            self._hand(pair.complete(body))

        def _hand(self, asked: AbstractContextManager[http.client.HTTPResponse]) -> None:
            """Each piece goes on as it comes."""
            with ExitStack() as stack:
                try:
                    answer = stack.enter_context(asked)
                except ConnectionError as error:
                    self.send_error(502, str(error))
                    return
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
                self.end_headers()
                while piece := answer.read1(1 << 16):
                    self.wfile.write(piece)
                    self.wfile.flush()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class calls it so
            """Nothing is printed."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


@app.callback(invoke_without_command=True)
def main(
    prefill: Annotated[str, typer.Option(metavar="URL", help="The server that reads prompts.")],
    decode: Annotated[str, typer.Option(metavar="URL", help="The server that answers.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where to listen.")] = 8000,
) -> None:
    """The command: serves until it is interrupted."""
    for url in (prefill, decode):
        if urllib.parse.urlsplit(url).scheme != "http":
            raise CommandError(f"{url}: no address of a server; pass one such as http://127.0.0.1:8100")
    with door(Pair(Machine(prefill), Machine(decode)), port) as served:
        typer.echo(f"http://127.0.0.1:{port}: prompts to {prefill}, answers from {decode}")
        served.serve_forever()


if __name__ == "__main__":
    app()
