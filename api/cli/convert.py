"""``asyncdock convert``: a recipe from the configuration of TRL or verl
(orchestration.recipe.conversion)."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

import typer

from api.cli.common.output import refuse
from api.terminal.numbers import counted
from api.terminal.screen import complain, write


def convert_command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A trainer's YAML file, or a script that starts the trainer."
        ),
    ],
    of: Annotated[
        Literal["trl", "verl"] | None,
        typer.Option("--from", help="Whose it is. Default: what its keys say."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="RECIPE.toml", help="Where to write. Default: standard output."),
    ] = None,
) -> None:
    """Write a recipe from the configuration of TRL's or verl's trainer, and list what it could not
    carry over."""
    from orchestration.recipe.conversion import trl, verl
    from orchestration.recipe.conversion.conversion import NotConverted, read_settings
    from orchestration.recipe.loading.toml import toml_tables

    try:
        settings = read_settings(file)
    except (NotConverted, OSError, UnicodeDecodeError) as error:
        refuse(f"FILE: {error}")
    if of is None:
        of = "verl" if any("." in name for name in settings.keys() & verl.RULES.keys()) else "trl"
    trainer = trl if of == "trl" else verl
    if not settings.keys() & trainer.RULES.keys():
        refuse(f"FILE: {file} has no setting of TRL's or verl's trainer; give its configuration")
    done = trainer.convert(settings)
    text = toml_tables(done.tables())
    if out is None:
        write(text.rstrip("\n"))
    else:
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            refuse(f"--out: {error}")
        complain(f"Wrote {out}. Next: asyncdock check {out}")
    complain(f"{len(done.carried)} settings carried over.")
    for name, remark in done.remarks.items():
        complain(f"  {name}: {remark}")
    if done.unknown:
        complain(f"Not known to this converter: {counted(len(done.unknown), 'setting')}")
    for table, names in groupby(done.unknown, key=lambda name: name.rpartition(".")[0]):
        listed = ", ".join(name.rpartition(".")[2] for name in names)
        complain(f"  {table}: {listed}" if table else f"  {listed}")
