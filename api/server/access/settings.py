"""Settings of a server: what ``asyncdock serve`` was started with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

RunsOf = Literal["service", "folders", "none"]
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Settings(BaseModel):
    """Settings of ``asyncdock serve``. Sizes in bytes, times in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: Path
    """The folder of the service: its lock, its own index, the token of its user, the folders of
    runs."""
    host: str = "127.0.0.1"
    port: int = Field(default=8765, ge=0, le=65535)
    index: str = ""
    """URL of an index; "" for a server of its own under ``data``."""
    runs: int = Field(default=1, ge=0)
    """Runs that execute at once; 0: other agents execute them."""
    runs_of: RunsOf = "service"
    """service: runs are submitted to it; folders: it shows runs of folders; none: it has no runs."""
    roots: tuple[Path, ...] = ()
    """Folders below which every path in a recipe must lie."""
    recipes: tuple[Path, ...] = ()
    """Folders of stored recipes, before the package's."""
    allow_rewards: frozenset[str] = frozenset()
    """``module:name`` of reward functions that a recipe may name beside installed ones. The next
    four likewise."""
    allow_algorithms: frozenset[str] = frozenset()
    allow_stages: frozenset[str] = frozenset()
    allow_engines: frozenset[str] = frozenset()
    allow_datasets: frozenset[str] = frozenset()
    allow_listen: frozenset[str] = frozenset()
    """Addresses where runs may open ports."""
    allow_teachers: frozenset[str] = frozenset()
    """URLs that runs may ask as teachers."""
    allow_checkpoints: frozenset[str] = frozenset()
    """Values that ``checkpoint.url`` may have."""
    allow_clusters: frozenset[str] = frozenset()
    """Values that ``launch.address`` may have."""
    allow_networks: frozenset[str] = frozenset()
    """Reward functions that may have the network in their sandbox."""
    allow_environment: frozenset[str] = frozenset()
    """Variables that reward functions may see."""
    unsandboxed_code: bool = False
    """Whether code of ``allow_rewards`` may run without a sandbox."""
    no_token: bool = False
    """Every request is the owner's; on loopback alone."""
    hosts: tuple[str, ...] = ()
    """Further host names (behind a proxy)."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    body_limit: int = Field(default=2**20, ge=1)
    body_seconds: float = Field(default=20.0, gt=0)
    handler_seconds: float = Field(default=60.0, gt=0)
    header_seconds: float = Field(default=10.0, gt=0)
    """Time until a request's headers are complete."""
    idle_seconds: float = Field(default=75.0, gt=0)
    max_connections: int = Field(default=0, ge=0)
    """0: derived from the limit of open files."""
    max_connections_per_address: int = Field(default=0, ge=0)
    """0: derived from the limit of open files."""
    rate: float = Field(default=1000.0, gt=0)
    """Requests of one client per second."""
    burst: int = Field(default=2000, ge=1)
    """Requests of one client at once."""
    policies: int = Field(default=3, ge=0)
    """Policies that are open at once; 0: none."""
    checkpoints: dict[str, Path] = {}
    """Folders of models that are served, by name."""
    max_waiting: int = Field(default=1000, ge=1)
    """Runs in the queue."""
    max_workers: int = Field(default=64, ge=3)
    """Workers of one recipe."""
    max_arena: int = Field(default=16 * 2**30, gt=0)
    """Bytes of the arena of one recipe."""

    @property
    def loopback(self) -> bool:
        """Whether the server can be reached from this machine only."""
        return self.host in LOOPBACK or re.fullmatch(r"127(\.\d{1,3}){3}", self.host) is not None

    @model_validator(mode="after")
    def _others_need_a_token(self) -> Self:
        if self.no_token and (self.hosts or not self.loopback):
            reached = (
                f"a proxy reaches it as {self.hosts[0]}"
                if self.hosts
                else f"{self.host} is reached from elsewhere"
            )
            raise ValueError(
                f"no_token: {reached}, and whoever reaches a service without tokens runs code as "
                f"its user; leave --no-token out, or listen on 127.0.0.1 without --host-name"
            )
        return self

    @property
    def tokens_needed(self) -> bool:
        return not self.no_token
