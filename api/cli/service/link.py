"""``asyncdock link``: a link that signs a browser in to a service, once.

the token that commands use ──▶ POST /v1/login/links ──▶ URL with the code in its fragment, which no server is sent
"""

from __future__ import annotations

import sys
from urllib.parse import urlsplit

from api.cli.common.options import JsonOption
from api.cli.common.output import advised, print_json
from api.cli.service.asking import ServerOption, ask
from api.client.credentials import DEFAULT_SERVER
from api.terminal.screen import complain, write
from orchestration.service.own_services import ANY


def link_command(server: ServerOption = DEFAULT_SERVER, as_json: JsonOption = False) -> None:
    """Print a link that signs a browser in to the dashboard: once, within ten minutes, with what
    your token may."""
    link = ask(server, lambda client: client.login_link())
    url = login_link(server, link.code)
    print_json({"url": url, "seconds": link.seconds}) if as_json else write(url)


def login_link(server: str, code: str) -> str:
    """Return the address that signs a browser in at ``server``.

    >>> login_link("http://0.0.0.0:8765", "CODE")
    'http://127.0.0.1:8765/#login=CODE'
    """
    parts = urlsplit(server)
    reached = {ANY[4]: "127.0.0.1", ANY[6]: "[::1]"}.get(parts.hostname or "")
    place = f"{reached}:{parts.port}" if reached else parts.netloc
    return f"{parts.scheme}://{place}{parts.path.rstrip('/')}/#login={code}"


def print_login_link(server: str, code: str) -> None:
    """Print the link that signs a browser in at ``server``, with its ``code`` ("": print nothing).

    A log, which others may read, gets no code.
    """
    command = advised("link" if server == DEFAULT_SERVER else f"link --server {server}")
    if code and sys.stdout.isatty():
        print(f"Open {login_link(server, code)}", flush=True)
        print(f"once, within ten minutes; `{command}` prints another link", flush=True)
    elif code:
        complain(f"`{command}` prints a link that signs a browser in.")
