"""What a run's environments declare, for each worker that needs it.

environment worker ─▶ declares ─▶ ENVIRONMENTS in the index ─▶ flow worker: prompts with the tools
                                                           └─▶ rollout workers: tokens that end a turn
"""

from __future__ import annotations

from orchestration.state.documents import ENVIRONMENTS
from pipeline.documents.flow import STATE
from pipeline.index.client import Index
from stages.environments.interface import Declarations

WAIT_SECONDS = 10.0


async def declarations(index: Index) -> Declarations:
    """Return what the run's environments declare, once their worker has said it."""
    position = ""
    while (declared := await ENVIRONMENTS.get(index)) is None:
        position = await index.woken(STATE, position, WAIT_SECONDS)
    return declared
