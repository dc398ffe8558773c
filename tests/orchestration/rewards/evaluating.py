"""Reward functions that evaluate what a policy wrote, as libraries' scorers do.

Importing this needs no torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def gym_as_it_is(
    completions: list[str], question: list[Any], answer: list[Any], metadata: list[Any]
) -> list[float]:
    """reasoning_gym's own scorers, some of which evaluate the answer."""
    from reasoning_gym import get_score_answer_fn

    rows = zip(completions, question, answer, metadata, strict=True)
    return [
        float(
            get_score_answer_fn(about["source_dataset"])(
                text, {"question": q, "answer": a, "metadata": about}
            )
        )
        for text, q, a, about in rows
    ]


def evaluated(completions: list[str], **_: Any) -> list[float]:
    return [float(eval(text)) for text in completions]


def environment(completions: list[str], **_: Any) -> list[float]:
    """Whether the text is in the environment that this process shows anywhere."""
    shown = repr(dict(os.environ)).encode()
    shown += Path("/proc/self/environ").read_bytes() + Path("/proc/self/cmdline").read_bytes()
    return [float(text.encode() in shown) for text in completions]


def reads(completions: list[str], **_: Any) -> list[float]:
    """Whether the file with this name can be read."""
    return [float(os.access(text, os.R_OK)) for text in completions]
