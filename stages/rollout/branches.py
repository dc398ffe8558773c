"""Turns of branches: an engine generates what follows one path, and the row has all of them.

the row's tokens ─▶ along_path ─▶ those of its newest branch's path ─▶ engine ─▶ joined ─▶ the row's tokens, and the new ones
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from stages.branches import branches_of, versions_at
from stages.engines.protocols import Begun, Completion


def along_path(row: Begun, branches: Sequence[int]) -> Begun:
    """Return of ``row``, with the column ``branches``, the tokens of its newest branch's path."""
    tokens = len(row.token_ids)
    path = branches_of(branches, tokens)[-1].path()
    return Begun(
        row.token_ids[path],
        row.logprobs[path],
        versions_at(row.versions, path),
        turn_start=row.turn_start - (tokens - len(path)),
        aside=tokens - len(path),
    )


def joined(completion: Completion, row: Begun, aside: int) -> Completion:
    """Return ``completion``, of the path of ``row`` that leaves ``aside`` of its tokens out, with
    all of them."""
    path = len(row.token_ids) - aside
    versions = versions_at(completion.versions, range(path, len(completion.token_ids)))
    return replace(
        completion,
        token_ids=torch.cat([row.token_ids, completion.token_ids[path:]]),
        logprobs=torch.cat([row.logprobs, completion.logprobs[path:]]),
        versions=(*row.versions, *versions),
    )
