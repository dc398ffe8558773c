"""Checks of the recipes of requests, and simulations of runs, in processes of
:mod:`api.server.service.check_worker`."""

from __future__ import annotations

from functools import partial

from orchestration.processes.confined import Confined, Interpreter

AT_ONCE = 4  # checks and simulations, each of another token; others wait for their turn


class Checks(Confined):
    """Checks and simulations in confined processes
    (:class:`~orchestration.processes.confined.Confined`). :func:`api.server.service.check_worker.answer`
    has the questions."""

    def __init__(self) -> None:
        super().__init__(partial(Interpreter, "api.server.service.check_worker"), most=AT_ONCE)
