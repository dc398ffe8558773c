"""``asyncdock deploy``: serves the policy of a run as a deployment of Ray Serve.

options ──▶ PolicySource, Settings ──▶ api.policy.deployment ──▶ URL on standard output; the deployment stays
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from api.cli.exit_codes import FAILED
from api.cli.options import IndexOption
from api.cli.output import refuse


def deploy_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")],
    index: IndexOption = "",
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder of the service, for its own index.")
    ] = None,
    address: Annotated[
        str, typer.Option("--address", metavar="ADDRESS", help="Of the Ray cluster, as `ray://HOST:PORT`.")
    ] = "auto",
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Of Serve's proxies.")] = "127.0.0.1:8000",
    least: Annotated[int, typer.Option("--min", min=0, help="Replicas.")] = 1,
    most: Annotated[int, typer.Option("--max", min=1, help="Replicas.")] = 1,
    target: Annotated[float, typer.Option(help="Requests under way in a replica, by which Serve scales.")] = 16.0,
    cpus: Annotated[float, typer.Option(help="CPUs of a replica.")] = 1.0,
    gpus: Annotated[float, typer.Option(help="GPUs of a replica.")] = 0.0,
    require_token: Annotated[bool, typer.Option("--require-token", help="On loopback too.")] = False,
    rate: Annotated[float, typer.Option(help="Requests a second of one address, in each replica.")] = 1000.0,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the deployment of RUN instead.")] = False,
) -> None:
    """Serve the newest policy of RUN, and its versions, on a Ray cluster, with Ray Serve's autoscaling."""
    try:
        from api.policy.deployment import deploy, undeploy
    except ImportError as error:
        refuse(f"deploy: {error}; install it with: pip install 'asyncdock[ray]'", FAILED)
    from api.server.service import Settings
    from orchestration.policy.source import PolicySource
    from orchestration.service.index_server import ServiceIndex

    if least > most:
        refuse(f"--min: {least} is more than --max, which is {most}; raise --max")
    if not index and data is None:
        refuse("deploy: give the index of the run, with --index URL, or --data DIR of the service on this machine")
    host, _, port = listen.rpartition(":")
    try:
        if remove:
            return undeploy(run, address)
        url = index or ServiceIndex(data).start()  # type: ignore[arg-type]
        settings = Settings(
            data=data or Path(),
            host=host,
            port=int(port),
            require_token=require_token,
            rate=rate,
            burst=int(2 * rate) + 1,
        )
        scale = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": target}
        deploy(
            PolicySource(run, url, run, beside=False), settings, scale, {"num_cpus": cpus, "num_gpus": gpus}, address
        )
    except ValueError as error:
        refuse(f"deploy: {error}")
    except (OSError, RuntimeError) as error:
        refuse(f"deploy: {error}", FAILED)
    print(f"Ray Serve serves {run} at http://{listen}/v1")
