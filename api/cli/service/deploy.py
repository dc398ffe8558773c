"""``asyncdock deploy``: serves the policy of a run as a deployment of Ray Serve.

options ──▶ Settings, PolicyDeployment ──▶ Ray Serve ──▶ URL on standard output; the deployment stays
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from api.cli.common.exit_codes import FAILED
from api.cli.common.options import IndexOption
from api.cli.common.output import refuse
from pipeline.compat.extras import ExtraMissing, extra, is_installed


def deploy_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")],
    index: IndexOption = "",
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder of the service, for its own index."),
    ] = None,
    address: Annotated[
        str,
        typer.Option(
            "--address", metavar="ADDRESS", help="Of the Ray cluster, as `ray://HOST:PORT`."
        ),
    ] = "auto",
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Of Serve's proxies.")
    ] = "127.0.0.1:8000",
    least: Annotated[int, typer.Option("--min", min=0, help="Replicas.")] = 1,
    most: Annotated[int, typer.Option("--max", min=1, help="Replicas.")] = 1,
    target: Annotated[
        float, typer.Option(help="Requests under way in a replica, by which Serve scales.")
    ] = 16.0,
    delay: Annotated[
        float, typer.Option(help="Seconds of more than that, until Serve starts another.")
    ] = 30.0,
    cpus: Annotated[float, typer.Option(help="CPUs of a replica.")] = 1.0,
    gpus: Annotated[float, typer.Option(help="GPUs of a replica.")] = 0.0,
    no_token: Annotated[
        bool,
        typer.Option(
            "--no-token", help="Whoever reaches it on this machine may ask. On loopback alone."
        ),
    ] = False,
    rate: Annotated[
        float, typer.Option(help="Requests a second of one address, in each replica.")
    ] = 1000.0,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the deployment of RUN instead.")
    ] = False,
) -> None:
    """Serve the newest policy of RUN, and its versions, on a Ray cluster, with Ray Serve's
    autoscaling."""
    if is_installed("ray"):
        address = _admitted(address)
    try:
        with extra("ray"):
            import ray
            from ray import serve

        from api.server.deployment import PolicyDeployment
    except ExtraMissing as error:
        refuse(f"deploy: {error}", FAILED)
    from api.server.access.settings import Settings
    from orchestration.service.index_server import ServiceIndex

    if least > most:
        refuse(f"--min: {least} is more than --max, which is {most}; raise --max")
    if not (index or data or remove):
        refuse(
            "deploy: give the index of the run, with --index URL, or --data DIR of the service "
            "on this machine"
        )
    host, _, port = listen.rpartition(":")
    try:
        ray.init(address, log_to_driver=False)
        if remove:
            return serve.delete(run)
        url = index or ServiceIndex(data).start()  # type: ignore[arg-type]
        access: dict[str, Any] = {"no_token": no_token, "rate": rate, "burst": int(2 * rate) + 1}
        settings = Settings(data=data or Path(), index=url, host=host, port=int(port), **access)
        scale = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": target}
        deployment = PolicyDeployment.options(  # type: ignore[attr-defined]
            autoscaling_config={**scale, "upscale_delay_s": delay},
            ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
            max_ongoing_requests=settings.max_waiting,
        )
        serve.start(http_options={"host": host, "port": settings.port})
        serve.run(deployment.bind(run, settings.model_dump_json()), name=run, route_prefix="/")
    except ValueError as error:
        refuse(f"deploy: {error}")
    except (OSError, RuntimeError) as error:
        refuse(f"deploy: {error}", FAILED)
    print(f"Ray Serve serves {run} at http://{listen}/v1")


def _admitted(address: str) -> str:
    """Return the address of the cluster, with its token in the environment, which Ray reads when it
    is imported."""
    from orchestration.cluster.ray_cluster import LOCAL, ClusterRefused, find

    try:
        cluster = find(address, key="--address")
    except ClusterRefused as error:
        refuse(error, FAILED)
    if cluster.address == LOCAL:
        refuse(
            "--address: no Ray cluster runs on this machine; start one with `ray start --head`, or "
            "give its address",
            FAILED,
        )
    os.environ |= cluster.environment
    return cluster.address
