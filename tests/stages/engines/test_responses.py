"""What an engine hands on of a response."""

from __future__ import annotations

import torch

from stages.engines.protocols import GroupRequest, SamplingParams
from stages.engines.responses import ResponseInProgress


def test_a_version_that_made_no_token_is_none_of_a_response() -> None:
    """A request that is aborted before its first token ends with an empty piece."""
    params = SamplingParams(max_tokens=8)
    response = ResponseInProgress(GroupRequest(0, (0,), torch.tensor([1]), params, 0), 0)
    for version, tokens in ((3, 0), (4, 2), (4, 1), (5, 0)):
        response.add_version(version, tokens)
    assert response.completion("length").versions == ((4, 3),)
