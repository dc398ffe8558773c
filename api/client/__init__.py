"""Python clients: ``from api.client import Client, SyncClient, ExternalStage, open_run, start``.

The names are imported when they are first used: commands that need only the stored tokens stay
quick, and only ExternalStage imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from api.client.client import Client as Client
    from api.client.client import RunEvent as RunEvent
    from api.client.client import SyncClient as SyncClient
    from api.client.errors import ApiProblem as ApiProblem
    from api.client.errors import NotAllowed as NotAllowed
    from api.client.errors import NotAsyncDock as NotAsyncDock
    from api.client.errors import NotFound as NotFound
    from api.client.errors import NotShown as NotShown
    from api.client.errors import ServiceError as ServiceError
    from api.client.errors import Unreachable as Unreachable
    from api.client.errors import WrongInput as WrongInput
    from api.client.errors import WrongState as WrongState
    from api.client.external_stage import ExternalStage as ExternalStage
    from api.client.run import Run as Run
    from api.client.run import open_run as open_run
    from api.client.run import start as start

_CLIENTS = {
    "Client": "client",
    "SyncClient": "client",
    "RunEvent": "client",
    "ExternalStage": "external_stage",
    "Run": "run",
    "open_run": "run",
    "start": "run",
}


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_CLIENTS.get(name, 'errors')}"), name)
