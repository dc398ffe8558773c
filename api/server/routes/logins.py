"""Signing a browser in: a link for the caller's own token, and the session that the dashboard gets
for it."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from api.schemas.login import LinkView, Login, LoginView
from api.server.access.authorization import LOCAL
from api.server.access.logins import CODE_SECONDS, SESSION_SECONDS, user_of
from api.server.http.problems import HTTPProblem
from api.server.service.operations import operation
from api.server.service.service import PRINCIPAL, Service

_own: dict[str, Any] = {"scope": "read", "tag": "login"}


@operation(
    "POST", "/v1/login/links", summary="The code of a link", status=201, errors=(409,), **_own
)
async def create_login_link(service: Service, request: web.Request) -> LinkView:
    """A code that signs one browser in with the token of this request, once, on this machine by a
    browser of the same user."""
    token = request[PRINCIPAL]
    if token is LOCAL:
        detail = "This server asks for no token, so there is nothing to sign in to."
        raise HTTPProblem(409, detail, kind="no-token", fix="open its address as it is")
    return LinkView(code=service.logins.link(token, _user(service, request)), seconds=CODE_SECONDS)


@operation(
    "POST",
    "/v1/login",
    scope=None,
    summary="A session",
    tag="login",
    status=201,
    errors=(410,),
    seconds=0,
)
async def log_in(service: Service, request: web.Request, body: Login) -> LoginView:
    """A session for the code of a link. A second time it is refused."""
    text, token = service.logins.redeem(body.code, _user(service, request))
    return LoginView(token=text, name=token.name, scope=token.scope, seconds=SESSION_SECONDS)


@operation("DELETE", "/v1/login", summary="The session has ended", **_own)
async def log_out(service: Service, request: web.Request) -> None:
    """End the session whose token this request has. A token that is no session stays valid."""
    service.logins.forget(request.headers.get("Authorization", "").partition(" ")[2].strip())


def _user(service: Service, request: web.Request) -> int | None:
    """Return the user of this machine who asks; None when that is not known, or a proxy asks for
    others."""
    if request.transport is None or service.settings.hosts:
        return None
    client, server = (request.transport.get_extra_info(name) for name in ("peername", "sockname"))
    return user_of(client and client[:2], server and server[:2])
