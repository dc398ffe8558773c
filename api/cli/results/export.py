"""``asyncdock export``: a checkpoint of a run as a folder for others, and on the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from api.cli.common.exit_codes import FAILED
from api.cli.common.output import refuse
from api.cli.service.asking import ServerOption, split_step
from api.cli.service.run_files import folder_of
from api.client.credentials import DEFAULT_SERVER
from api.terminal.screen import complain, write

if TYPE_CHECKING:
    from orchestration.recipe.schema import Recipe
    from pipeline.data.events import Event


def export_command(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STEP]",
            help="The folder of a run, or its id in a service of this machine, and the step of a "
            "checkpoint. Default: the newest.",
        ),
    ],
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="A new folder.")],
    what: Annotated[
        Literal["merged", "adapter"],
        typer.Option(help="Of a run with LoRA: the whole model, or its adapter alone."),
    ] = "merged",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Of the weights. Default: as they are."),
    ] = None,
    base: Annotated[
        str,
        typer.Option(
            metavar="ID", help="The base model's name on the Hub, if its folder does not say it."
        ),
    ] = "",
    push: Annotated[
        str,
        typer.Option(metavar="REPO", help="Upload it there, as NAMESPACE/NAME, with HF_TOKEN."),
    ] = "",
    private: Annotated[
        bool, typer.Option("--private", help="With --push: for you and your organisation alone.")
    ] = False,
    server: ServerOption = DEFAULT_SERVER,
) -> None:
    """Write a checkpoint of RUN as a folder that transformers opens, with its recipe, metrics and
    model card."""
    from orchestration.publishing.export import export
    from orchestration.publishing.hub import PushFailed, check_push, publish
    from orchestration.recipe.problems import RecipeError
    from orchestration.state.lock import RunError
    from pipeline.locks import Locked
    from pipeline.problems import Fatal

    name, version = split_step(run)
    if private and not push:
        refuse("--private: is about --push; give both, or neither")
    try:
        if push:
            check_push(push)
        folder = folder_of(name, server)
        step, notes = export(folder, to, version, what=what, dtype=dtype, base=base, plot=plot)
        write(f"{to} has the model of step {step}")
        for note in notes:
            complain(f"note: {note}")
        if push:
            write(publish(to, push, f"Step {step} of {name}", private=private))
    except (RunError, RecipeError) as error:
        refuse(error)
    except (Fatal, Locked, PushFailed, OSError) as error:
        refuse(error, FAILED)


def plot(path: Path, recipe: Recipe, events: Sequence[Event]) -> None:
    """Plot ``events`` to ``path`` as at the end of a run."""
    from api.terminal.report import progress_of, write_plot

    progress = progress_of(recipe, events)
    if progress.last:
        write_plot(path, progress)
