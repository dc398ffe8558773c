"""What Tinker's SDK can ask of a server, read from the SDK itself: a program for its environment.

clients, command line, requests, messages, addresses ──▶ JSON on standard output
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import tinker
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tinker import types
from tinker._models import StrictBase
from tinker.cli.__main__ import main_cli
from tinker.proto import tinker_public_pb2

CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient")
# models of requests that the SDK does not check, and of what its clients are told to do
FURTHER = (
    *(types.SamplingParams, types.ClientConfigResponse),
    types.ClientDynamicConfigResponse,
)


def methods(client: str) -> list[str]:
    """Public methods. Those that end with _async are the others once more."""
    names = [
        name
        for name, value in inspect.getmembers(getattr(tinker, client))
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    ]
    return [name for name in names if name.removesuffix("_async") not in {*names} - {name}]


def commands(group: Any, words: tuple[str, ...]) -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*words, name))
        else:
            yield " ".join((*words, name))


def subclasses(model: type) -> Iterator[type]:
    for each in model.__subclasses__():
        yield each
        yield from subclasses(each)


def requests() -> dict[str, list[str]]:
    """The fields of each model of a request, without the ``type`` that is its name."""
    for module in pkgutil.walk_packages(types.__path__, "tinker.types."):
        importlib.import_module(module.name)
    models: list[Any] = [*subclasses(StrictBase), *FURTHER]
    return {
        model.__name__: [name for name in model.model_fields if name != "type"]
        for model in models
        if not model.__name__.endswith("Base")
    }


def messages(found: Any, prefix: str = "") -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """Each message, with number and type of each field."""
    descriptors: list[Descriptor] = [*found.values()]
    for message in descriptors:
        fields: list[FieldDescriptor] = [*message.fields]
        yield prefix + message.name, {field.name: (field.number, field.type) for field in fields}
        yield from messages(message.nested_types_by_name, f"{prefix}{message.name}.")


def paths() -> list[str]:
    """The addresses in the source; {}: where a name or an id is."""
    found = set()
    for file in Path(tinker.__file__).parent.rglob("*.py"):
        if file.name.endswith("_test.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            parts: list[ast.expr] = node.values if isinstance(node, ast.JoinedStr) else []
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts
            )
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            if text.startswith("/api/v1/") and " " not in text:
                found.add(text.partition("?")[0])
    # what an address with names begins with is a constant of its own
    return sorted(each for each in found if not each.endswith("/"))


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "methods": {client: methods(client) for client in CLIENTS},
                "commands": [*commands(main_cli, ("tinker",))],
                "requests": requests(),
                "messages": dict(messages(tinker_public_pb2.DESCRIPTOR.message_types_by_name)),
                "paths": paths(),
            }
        )
    )
