"""Authorization of a request: the token that it presents, and whether its scope is enough."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from api.server.access.tokens import OWN, Scope, Token
from api.server.http.problems import HTTPProblem

NO_TOKEN = "none"  # is as if no token came: clients of OpenAI's API cannot be made without one
TINKER_PREFIX = "tml-"  # without which Tinker's clients take no key
LOCAL = Token("local", OWN, "admin", 0.0, None)  # the token of every request where none is required

Find = Callable[[str], Awaitable[Token | None]]


async def allowed(find: Find, headers: Mapping[str, str], scope: Scope, *, needed: bool) -> Token:
    """Return the token of a request, which ``find`` looks up; LOCAL where none came and none is
    ``needed``. Raises an HTTPProblem (401, 403)."""
    key = headers.get("x-api-key")  # as Anthropic's and Tinker's clients send it
    default = f"Bearer {key.removeprefix(TINKER_PREFIX)}" if key else ""
    kind, _, presented = headers.get("Authorization", default).partition(" ")
    kind = "" if presented == NO_TOKEN else kind
    if not kind and not needed:
        return LOCAL
    token = await find(presented.strip()) if kind.lower() == "bearer" else None
    if token is None:
        reason = "The token is not valid." if kind else "A token is needed."
        fix = (
            "send the header 'Authorization: Bearer TOKEN'. The user who runs the service has it "
            "in the file `authorization` of its folder (curl -H @FILE), and makes one for others "
            "with `asyncdock token create`"
        )
        raise HTTPProblem(
            401,
            reason,
            kind="token",
            fix=fix,
            headers={"WWW-Authenticate": 'Bearer realm="asyncdock"'},
        )
    if not token.may(scope):
        detail = f"This needs a token of scope {scope}; the one given has scope {token.scope}."
        raise HTTPProblem(403, detail, kind="scope", fix=f"ask for a token of scope {scope}")
    return token
