"""What is asked for in a body of HTTP where nobody reads it."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from sparseprefill.adapters.serving.doors import Doors, Guard, guard
from sparseprefill.adapters.sglang import doors as sglang
from sparseprefill.adapters.vllm import doors as vllm

OFF = {"sparseprefill": "off"}
MESSAGES = [{"role": "user", "content": "sparseprefill"}]
HARMLESS: list[dict[str, Any]] = [
    {"prompt": 'as in {"sparseprefill": "off"}'},
    {"messages": MESSAGES, "metadata": OFF},
    {"messages": MESSAGES, "tools": [OFF], "guided_json": {"properties": OFF}, "prefix": 3},
    {"prompt": "x", "sampling_params": {"n": 1, "json_schema": "sparseprefill", "list": [OFF]}},
]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", {"vllm_xargs": OFF}, None),
        ("/v1/completions", {"vllm_xargs": {"sparsprefill": "off"}}, None),  # which the engine refuses
        ("/v1/chat/completions/batch", {"vllm_xargs": OFF}, None),
        ("/v1/messages", {"vllm_xargs": OFF}, None),
        ("/v1/responses", {"vllm_xargs": OFF}, None),
        ("/invocations", {"vllm_xargs": OFF}, None),
        ("/inference/v1/generate", {"sampling_params": {"extra_args": OFF}}, None),
        (
            "/v1/completions",
            OFF,
            "sparseprefill is 'off', which /v1/completions does not read there: pass it as vllm_xargs.sparseprefill",
        ),
        ("/v1/completions", {"SparsePrefill": "off"}, "SparsePrefill is 'off', which /v1/completions does not"),
        ("/v1/completions", {"vllm_xargs": OFF, "sparseprefil": "off"}, "sparseprefil is 'off', which"),
        ("/v1/completions", {"custom_params": {"sparseprefill": 3}}, "custom_params.sparseprefill is 3, which"),
        ("/v1/completions", {"vllm_xarg": OFF}, "vllm_xarg.sparseprefill is 'off', which"),
        ("/v1/chat/completions", {"extra_body": {"vllm_xargs": OFF}}, "extra_body.vllm_xargs.sparseprefill is"),
        ("/v1/messages", {"metadata": {"user_id": "a"}, **OFF}, "pass it as vllm_xargs.sparseprefill"),
        ("/inference/v1/generate", {"vllm_xargs": OFF}, "pass it as sampling_params.extra_args.sparseprefill"),
        ("/cohere/v2/chat", {"vllm_xargs": OFF}, "leave it out, or ask /v1/completions, with vllm_xargs.sparse"),
        ("/v1/systemone", {"vllm_xargs": OFF}, "vllm_xargs.sparseprefill is 'off', which /v1/systemone does not"),
        ("/generative_scoring", OFF, "leave it out, or ask"),
        (
            "/v1/chat/completions",
            {"vllm_xargs": OFF, "use_beam_search": True},
            "which /v1/chat/completions drops where use_beam_search is True: leave one of the two out",
        ),
        ("/v1/chat/completions", {"vllm_xargs": OFF, "use_beam_search": False}, None),
        ("/v1/chat/completions", {"use_beam_search": True, "model": "sparse"}, None),
        ("/tokenize", OFF, None),
        ("/v1/messages/count_tokens", {"vllm_xargs": OFF, **OFF}, None),
        *(("/v1/completions", body, None) for body in HARMLESS),
        ("/v1/completions", [OFF], None),
        ("/v1/completions", None, None),
    ],
)
def test_vllm_s_endpoints(path: str, body: object, said: str | None) -> None:
    check(vllm.DOORS, path, body, said)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/score", "/rerank", "/classify", "/invocations"])
@pytest.mark.parametrize("body", [OFF, {"vllm_xargs": OFF}])
def test_a_model_of_vectors_takes_no_wish_in_vllm(path: str, body: dict[str, Any]) -> None:
    check(vllm.POOLING, path, body, "no endpoint of this model takes it, so leave it out")


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", {"custom_params": OFF}, None),
        ("/v1/chat/completions", {"custom_params": OFF}, None),
        ("/invocations", {"custom_params": OFF}, None),
        ("/generate", {"sampling_params": {"custom_params": OFF}}, None),
        ("/generate", {"sampling_params": [{"custom_params": OFF}, {}]}, None),
        ("/encode", {"sampling_params": {"custom_params": OFF}}, None),
        ("/vertex_generate", {"parameters": {"sampling_params": {"custom_params": OFF}}}, None),
        (
            "/generate",
            {"custom_params": OFF},
            "custom_params.sparseprefill is 'off', which /generate does not read there: pass it as "
            "sampling_params.custom_params.sparseprefill",
        ),
        ("/generate", OFF, "sparseprefill is 'off', which /generate"),
        ("/generate", {"sampling_params": OFF}, "sampling_params.sparseprefill is 'off', which"),
        ("/generate", {"sampling_params": [{}, OFF]}, "sampling_params.sparseprefill is 'off', which"),
        ("/generate", {"sampling_params": {"extra_args": OFF}}, "sampling_params.extra_args.sparseprefill is"),
        ("/vertex_generate", {"parameters": {"custom_params": OFF}}, "parameters.custom_params.sparseprefill is"),
        ("/v1/completions", {"vllm_xargs": OFF}, "pass it as custom_params.sparseprefill"),
        ("/v1/completions", {"sampling_params": {"custom_params": OFF}}, "pass it as custom_params.sparseprefill"),
        *(
            (path, {"custom_params": {"sparseprefill": "fast"}}, f"'fast', which {path} does not read there: leave it")
            for path in ("/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score", "/v1/rerank", "/api/chat")
        ),
        ("/v1/tokenize", OFF, None),
        *(("/generate", body, None) for body in HARMLESS),
    ],
)
def test_sglang_s_endpoints(path: str, body: object, said: str | None) -> None:
    check(sglang.DOORS, path, body, said)


def check(doors: Doors, path: str, body: object, said: str | None) -> None:
    found = doors.objection(path, body)
    assert (said is None) == (found is None), found
    assert said is None or said in str(found)


DOORS = Doors(places={"/a": ("x",)})
FOUND = {"object": "error", "type": "error", "code": 400}


@pytest.mark.parametrize(
    "body",
    [
        rb'{"sp\u0061r\u0073eprefi\u006c\u006C": "off"}',
        json.dumps(OFF).encode("utf-16"),
        json.dumps(OFF).encode("utf-32-le"),
    ],
)
def test_names_in_other_letters_are_read_as_the_server_reads_them(body: bytes) -> None:
    (start, _) = Server().ask(body)
    assert 400 == start["status"]


class Server:
    """An application of ASGI that keeps what it was sent, with a guard in front of it."""

    def __init__(self, doors: Doors | None = DOORS) -> None:
        self.heard: list[Any] = []
        self.guarded = Guard(self, doors=lambda scope: doors)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while scope["type"] == "http":
            self.heard.append(await receive())
            if not self.heard[-1].get("more_body"):
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def ask(self, *parts: bytes, path: str = "/a", ended: bool = True, **more: Any) -> list[dict[str, Any]]:
        came = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        came[-1]["more_body"] = not ended
        self.sent = [*came, {"type": "http.disconnect"}]
        coming, told = iter(self.sent), list[dict[str, Any]]()

        async def receive() -> Any:
            return next(coming)

        async def send(message: Any) -> None:
            told.append(message)

        scope = {"type": "http", "method": "POST", "path": path, **more}
        asyncio.run(self.guarded(scope, receive, send))
        return told


def test_a_request_is_refused_in_words_that_every_client_reads() -> None:
    server = Server()
    start, rest = server.ask(b'{"sparse', b'prefill": "off"}', path="/mount/a", root_path="/mount")
    why = "sparseprefill is 'off', which /a does not read there: pass it as x.sparseprefill"
    assert (400, []) == (start["status"], server.heard)
    assert (b"content-length", str(len(rest["body"])).encode()) in start["headers"]
    error = {"message": why, "code": 400, "type": "invalid_request_error", "param": "sparseprefill"}
    assert {**FOUND, "message": why, "error": error} == json.loads(rest["body"])


@pytest.mark.parametrize(
    ("parts", "more"),
    [
        ([b'{"x": {"sparseprefill"', b': "off"}}'], {}),
        ([b'{"sparseprefill": '], {}),  # no JSON: the server will say so
        ([b'{"a": 1}', b""], {}),
        ([b"\xffsparse"], {}),
        ([b'{"sparseprefill": "off"}'], {"method": "GET"}),
        ([b'{"sparseprefill": "off"}'], {"type": "websocket"}),
        ([b'{"sparseprefill": '], {"ended": False}),  # and then the client is gone
    ],
)
def test_everything_else_goes_through_as_it_came(parts: list[bytes], more: dict[str, Any]) -> None:
    server = Server()
    assert [200] == [one["status"] for one in server.ask(*parts, **more)]
    if more.get("type", "http") == "http":
        assert server.sent[: len(parts) + ("ended" in more)] == server.heard


def test_where_the_backend_is_not_selected_nobody_looks() -> None:
    server = Server(None)
    assert [200] == [one["status"] for one in server.ask(b'{"sparseprefill": "off"}')]


class Entry:
    """In the place of Starlette's Middleware."""

    def __init__(self, cls: Any, **kwargs: Any) -> None:
        self.cls, self.kwargs = cls, kwargs


class App:
    """In the place of a Starlette with something in front of it."""

    def __init__(self) -> None:
        self.user_middleware = [Entry(dict)]
        self.state: Any = type("State", (), {})()


def test_a_guard_stands_innermost_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sparseprefill.adapters.serving.doors.import_module", lambda name: type(name, (), {"Middleware": Entry})
    )
    app = App()
    for _ in range(2):
        guard(app, lambda scope: DOORS)
    assert [dict, Guard] == [one.cls for one in app.user_middleware]
