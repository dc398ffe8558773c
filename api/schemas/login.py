"""Models of signing a browser in."""

from __future__ import annotations

from pydantic import BaseModel, Field

from api.schemas.runs import Strict


class LinkView(BaseModel):
    """A code that signs a browser in once: the dashboard takes it from its address, as
    ``/#login=CODE``."""

    code: str
    seconds: float = Field(description="For which it can be used.")


class Login(Strict):
    code: str = Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=100)


class LoginView(BaseModel):
    """A session: its ``token`` is sent as any other token, may what the token may that the link was
    made with, and ends with it, with the server, or after ``seconds``."""

    token: str
    name: str = Field(description="Whose it is; runs are owned by this name.")
    scope: str
    seconds: float
