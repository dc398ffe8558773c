"""Names of what is served, and why a request for it is refused. Imported without torch."""

from __future__ import annotations

import re


class PolicyUnknown(LookupError):
    """There is no such policy, or none yet; the message says which there are."""


class PoliciesBusy(RuntimeError):
    """As many policies as may be are in use; the message names them."""


def parse_model(model: str) -> tuple[str, int | None]:
    """Return the name and the version of ``NAME@VERSION``, or of ``NAME`` and None.

    Raises PolicyUnknown.

    >>> parse_model("tiny@20"), parse_model("tiny")
    (('tiny', 20), ('tiny', None))
    """
    match = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9_.-]*)(?:@([0-9]{1,9}))?", model)
    if match is None:
        raise PolicyUnknown("a model is named as RUN, RUN@VERSION or NAME")
    return match[1], int(match[2]) if match[2] else None
