"""docs/tinker.md says of all that Tinker's newest SDK can ask what this server does with it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from api.tinker.messages import MESSAGES
from benchmarks.service.tinker_messages import OPERATIONS
from tests.api.tinker import sdk
from tests.pages.page import ROOT

# ours by those of the SDK, where the names differ; maps are messages of entries
NAMES = {
    "ForwardBackwardRequest.LossFnConfigEntry": "Number",
    "ForwardBackwardRequest.LossFnConfigV2Entry": "Option",
    "ForwardBackwardOutput.MetricsEntry": "Number",
    "LossConfigValue": "OptionValue",
    "Datum.LossFnInputsEntry": "TensorEntry",
    "EncodedTextChunk": "Text",
    "ProvenanceSpan": "Span",
    "SampledProvenanceSpan": "Sampled",
    "ArrayRecord": "Record",
    "ArrayRecord.FieldsEntry": "Field",
    "PromptAltTokens": "Drawn",
    "SampledSequence": "Sequence",
    "TopkLogprobs": "Top",
}
# wire types by those of fields
WIRE = {
    **dict.fromkeys((3, 4, 5, 8, 13, 14), "varint"),
    **dict.fromkeys((9, 11, 12), "bytes"),
    1: "double",
}
NOWHERE = "not here"


@pytest.fixture(scope="module")
def surface() -> Mapping[str, Any]:
    script = Path(__file__).with_name("surface.py")
    return dict(json.loads(sdk.program(sdk.NEWEST, script, "", "")))


@pytest.fixture(scope="module")
def rows() -> Mapping[str, str]:
    """The rows of the tables of the page by each name in their first cell."""
    page = (ROOT / "docs" / "tinker.md").read_text()
    tables = page[page.index("## What is the same") : page.index("## Which weights made a token")]
    return {
        name: row
        for row in re.findall(r"^\| `.*", tables, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])
    }


def test_each_call_has_a_row(surface: Mapping[str, Any], rows: Mapping[str, str]) -> None:
    names = {name for names in surface["methods"].values() for name in names}
    assert len(names) > 40
    assert sorted(names - rows.keys()) == []


def test_each_command_has_a_row(surface: Mapping[str, Any], rows: Mapping[str, str]) -> None:
    assert len(surface["commands"]) > 15
    assert sorted({*surface["commands"]} - rows.keys()) == []


def test_each_field_of_a_request_has_a_place(
    surface: Mapping[str, Any], rows: Mapping[str, str]
) -> None:
    assert len(surface["requests"]["SampleRequest"]) == 14
    missing = [
        f"{model}.{field}"
        for model, fields in surface["requests"].items()
        for field in ("", *fields)
        if f"`{field or model}`" not in rows.get(model, "")
    ]
    assert missing == []


def test_each_field_of_a_message_is_on_the_wire_or_said_to_be_skipped(
    surface: Mapping[str, Any], rows: Mapping[str, str]
) -> None:
    assert {*NAMES} < {*surface["messages"]}
    missing = []
    for message, fields in surface["messages"].items():
        ours = MESSAGES.get(NAMES.get(message, message))
        numbers = {} if ours is None else ours.DESCRIPTOR.fields_by_number
        for name, (number, kind) in fields.items():
            if number in numbers:
                assert WIRE[numbers[number].type] == WIRE[kind], f"{message}.{name}"
            elif f"`{name}`" not in (row := rows.get(f"pb.{message}", "")) or "skipped" not in row:
                missing.append(f"{message}.{name}")
    assert missing == []


def test_each_address_is_served_or_said_to_be_not_here(
    surface: Mapping[str, Any], rows: Mapping[str, str]
) -> None:
    # a checkpoint's id has a kind and a name
    served = {re.sub(r"\{kind\}/|external_weights/", "", each.path) for each in OPERATIONS}
    served = {re.sub(r"\{\w+\}", "{}", path) for path in served}
    unserved = {*surface["paths"]} - served
    assert "/api/v1/asample" in served
    assert sorted(path for path in unserved if NOWHERE not in rows.get(path, "")) == []
