"""Wishes in a body of HTTP where the server does not read them: refused, since it would drop them in silence.

A server's endpoints differ in where they take a request's arguments, and most of those that were made after another
company's interface take none. What is written elsewhere is ignored by all of them. `Guard` stands in front of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any

from attrs import define, field, frozen

from sparseprefill.errors import printed

from .wishes import SWITCH, mistyped

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Place = tuple[str, ...]
NESTING = ("sampling_params", "parameters", "extra_body")
"""Fields of a body that hold further tables of arguments."""
OWN = "metadata"
"""The field that is the caller's own, whatever it holds."""
SUSPECT = re.compile(rb"sparse|prefil|vllm_xargs|custom_params|extra_args|\\u00[2-7]|\x00", re.IGNORECASE)
"""In a body without this, or ASCII in other bytes (escaped, or UTF-16), nothing is asked for; it is not parsed."""


@frozen(kw_only=True)
class Doors:
    """Endpoints of a server, by their paths.

    places: where each that takes a request's arguments reads them, as the path of a table in the body. idle: those that
    compute no attention. losing: fields with which those of `places` drop the arguments after all.
    """

    places: Mapping[str, Place]
    idle: frozenset[str] = frozenset()
    losing: tuple[str, ...] = ()

    def objection(self, path: str, body: object) -> str | None:
        """Reason for refusing a body that asks for something where nobody reads it, or None. path: of the endpoint."""
        if path in self.idle or not isinstance(body, Mapping):
            return None
        place = self.places.get(path)
        for at, table in _tables(body):
            key = next((one for one in table if one == SWITCH or mistyped([one]) is not None), None)
            if key is None:
                continue
            said = f"{'.'.join((*at, str(key)))} is {printed(table[key])}"
            if at != place:
                return f"{said}, which {path} does not read there: {self._remedy(place)}"
            lost = next((one for one in self.losing if body.get(one)), None)
            if lost is not None:
                return f"{said}, which {path} drops where {lost} is {printed(body[lost])}: leave one of the two out"
        return None

    def _remedy(self, place: Place | None) -> str:
        if place is not None:
            return f"pass it as {'.'.join((*place, SWITCH))}"
        if not self.places:
            return "no endpoint of this model takes it, so leave it out"
        first, usual = next(iter(self.places.items()))
        return f"leave it out, or ask {first}, with {'.'.join((*usual, SWITCH))}"


def _tables(body: Mapping[str, Any]) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """The tables of a body in which arguments may stand, each with its path."""
    yield (), body
    for name, value in body.items():
        for one in value if isinstance(value, list) and name in NESTING else [value]:
            if isinstance(one, Mapping) and name in NESTING:
                yield from (((name, *at), table) for at, table in _tables(one))
            elif isinstance(one, Mapping) and name != OWN:
                yield (name,), one


@define(eq=False)
class Guard:
    """An application of ASGI in front of another: refuses what `doors` objects to, with status 400.

    doors: those of the server that a request has come to; None where requests are no business of ours.
    """

    app: Callable[[Scope, Receive, Send], Awaitable[None]]
    doors: Callable[[Scope], Doors | None] = field(kw_only=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands on whatever it does not refuse, as it came."""
        doors = self.doors(scope) if scope["type"] == "http" and scope["method"] in ("POST", "PUT") else None
        if doors is None:
            await self.app(scope, receive, send)
            return
        came = await _whole(receive)
        why = doors.objection(_path(scope), _parsed(b"".join(one.get("body", b"") for one in came)))
        if why is not None:
            await _refuse(send, why)
            return

        async def again() -> MutableMapping[str, Any]:
            return came.pop(0) if came else await receive()

        await self.app(scope, again, send)


def guard(app: Any, doors: Callable[[Scope], Doors | None]) -> None:
    """Put a `Guard` into a Starlette, behind all that it has in front of its endpoints (keys, compressed bodies), once.

    It must not have started."""
    if all(one.cls is not Guard for one in app.user_middleware):
        app.user_middleware.append(import_module("starlette.middleware").Middleware(Guard, doors=doors))


async def _whole(receive: Receive) -> list[MutableMapping[str, Any]]:
    """The messages of a request, up to the end of its body or of its connection."""
    came = [await receive()]
    while came[-1]["type"] == "http.request" and came[-1].get("more_body", False):
        came.append(await receive())
    return came


def _parsed(body: bytes) -> object:
    """The content of a body; None where that is no JSON, or asks for nothing."""
    if not SUSPECT.search(body):
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _path(scope: Scope) -> str:
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


async def _refuse(send: Send, why: str) -> None:
    """Status 400, in a form that clients of OpenAI's interface, of Anthropic's and of the servers' own can read."""
    told = {"message": why, "code": 400}
    error = {**told, "type": "invalid_request_error", "param": SWITCH}
    body = json.dumps({"object": "error", "type": "error", **told, "error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
