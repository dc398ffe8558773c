"""Types of the values that a recipe's keys hold: sizes in bytes, counts, durations, devices; and
the base of its tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from orchestration.bounds import LARGEST
from stages.device_names import EXAMPLES, PATTERN
from stages.json_schema import fault, unit

UNITS = {
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


def parse_size(value: object) -> object:
    """Return the bytes of ``64MiB`` or ``1.5 GiB``; what is no text, as it is.

    Raises ValueError with the accepted forms.

    Pydantic's ByteSize would also take ``8bit``, ``.5KiB`` and digits of other scripts, and fail on
    400 digits.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([A-Za-z]{1,3})?", value.strip())
    unit = (match[2] or "B").upper() if match else ""
    if match is None or unit not in UNITS:
        fix = "write a whole number of bytes or a text like '64MiB', '1.5GiB' or '500MB'"
        raise fault("is not a size", fix)
    return int(float(match[1]) * UNITS[unit])


def format_size(size: float) -> str:
    """Return a size in bytes as a text for people: ``64 MiB``."""
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {suffix}"
        size /= 1024
    return f"{size:.4g} TiB"


def size_from(least: int) -> BeforeValidator:
    """Return a validator that calls :func:`parse_size`; its JSON Schema allows ``least`` bytes or
    more, or a text."""
    number = r"([0-9]*[1-9][0-9]*(\.[0-9]+)?|0+\.0*[1-9][0-9]*)" if least else r"[0-9]+(\.[0-9]+)?"
    text = rf"^ *{number} ?([KkMmGg]?[Bb]|[KkMmGgTt][Ii][Bb])? *$"
    shown = (
        Annotated[int, Field(ge=least, le=LARGEST)]
        | Annotated[str, Field(json_schema_extra={"pattern": text})]
    )
    return BeforeValidator(parse_size, json_schema_input_type=shown)


Size = Annotated[int, size_from(1), Field(ge=1, le=LARGEST), unit("bytes")]
SizeOrZero = Annotated[int, size_from(0), Field(ge=0, le=LARGEST), unit("bytes")]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Tokens = Annotated[int, Field(ge=1), unit("tokens")]
TokensOrZero = Annotated[int, Field(ge=0), unit("tokens")]
Groups = Annotated[int, Field(ge=1), unit("groups")]
Steps = Annotated[int, Field(ge=1), unit("steps")]
StepsOrZero = Annotated[int, Field(ge=0), unit("steps")]
Seconds = Annotated[float, Field(gt=0), unit("seconds")]
Share = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[
    tuple[Share, Share],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]

Device = Annotated[str, Field(pattern=PATTERN, examples=EXAMPLES)]

INDEX_SCHEMES = ("redis://", "rediss://", "unix://")
INDEX_PATTERN = f"^(embedded$|{'|'.join(INDEX_SCHEMES)})"


def _index_url(value: object) -> object:
    if isinstance(value, str) and value != "embedded" and not value.startswith(INDEX_SCHEMES):
        fix = "use 'embedded', or a URL that begins with redis://, rediss:// or unix://"
        raise fault("is not an index", fix)
    return value


IndexUrl = Annotated[str, BeforeValidator(_index_url)]

AUTO_STALENESS = 4  # the largest bound that `pipeline.staleness = "auto"` allows
Staleness = Annotated[
    int,
    BeforeValidator(
        lambda value: AUTO_STALENESS if value == "auto" else value,
        json_schema_input_type=Annotated[int, Field(ge=0)]
        | Annotated[str, Field(pattern="^auto$")],
    ),
    Field(ge=0),
    unit("versions"),
]


def auto_staleness(pipeline: object) -> object:
    """What `staleness = "auto"` says of the section's other keys."""
    if isinstance(pipeline, Mapping) and pipeline.get("staleness") == "auto":
        return {"staleness_min": 1, **pipeline}
    return pipeline


DEVICE_MEANING = (
    "`auto`: the accelerator that torch finds, else the CPU. Worker processes share a node's "
    "devices out in turn (`asyncdock check` shows them); a number fixes one: `cuda:1`. `npu` needs "
    "torch_npu."
)


class Section(BaseModel):
    """A table of the recipe."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's, without what this table has cached of its old values."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(copied).model_fields.keys():
            del copied.__dict__[name]
        return copied
