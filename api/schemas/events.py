"""Payloads of the event stream, as ``GET /v1/runs/{run}/metrics/stream`` sends them: models that
are built from ``pipeline.data.events``.

A number that is not finite is null. An event may hold more keys than are named here: those of a
newer version.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from pipeline.data.events import EVENTS, EventData, Number, Time


class EventModel(BaseModel):
    """Base of the payloads."""

    model_config = ConfigDict(extra="allow")

    time: Time


class StepModel(EventModel):
    """Base of the payload of a step: all further keys are numbers."""

    __pydantic_extra__: dict[str, Number] = Field(init=False)


class EndMessage(BaseModel):
    """The last message of a stream: the run has ended."""

    state: Literal["stopped", "finished", "failed"]
    reason: str


class DroppedMessage(BaseModel):
    """The last message of a stream that the server gives up: connect again with the last id as
    Last-Event-ID."""

    reason: str


def _model(event: type[EventData]) -> type[EventModel]:
    """Return the model of ``event``: its name, its description and its fields.

    The metrics of a step are further keys.
    """
    hints = get_type_hints(event, include_extras=True)
    fields: dict[str, Any] = {
        name: (hints[name], ... if default is dataclasses.MISSING else default)
        for name, default in event.defaults()
        if name != "metrics"
    }
    base = StepModel if event.kind == "step" else EventModel
    return create_model(event.__name__, __base__=base, __doc__=event.__doc__, **fields)


MODELS = {kind: _model(event) for kind, event in EVENTS.items()}  # by kind
# by their `event`
MESSAGES: dict[str, type[BaseModel]] = {**MODELS, "end": EndMessage, "dropped": DroppedMessage}


def numbers_of(kind: str) -> list[str]:
    """Return the names of the numbers that every event of ``kind`` may have."""
    return [
        name
        for name, field in MODELS[kind].model_fields.items()
        if name != "time" and get_origin(field.annotation) is not list
        if {int, float} & {field.annotation, *get_args(field.annotation)}
    ]
