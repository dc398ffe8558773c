"""Ports for servers that a test starts later, or on the same port again."""

from __future__ import annotations

import random
import socket

# Below those that Linux and macOS give to whoever asks for any, as all the other tests do meanwhile,
# and above those of Ray's workers.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """Return a TCP port on which nothing listens now."""
    draw = random.SystemRandom()  # two tests that start at the same time draw different ones
    while True:
        port = draw.choice(_PORTS)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
