"""A rollout in a process of its own that joins the run's index and warehouses: it answers with
tokens drawn uniformly.

python direct.py URL RUN WORKER          URL: of the run's index, or of a service
"""

import asyncio
import math
import sys

import torch

from api.client import ExternalStage
from orchestration.external.errors import WeightsTooOld
from pipeline.data.columns import Packed
from pipeline.index.client import LeaseLost


def respond(
    rows: int, version: int, vocabulary: int, tokens: int
) -> dict[str, Packed | torch.Tensor]:
    """Columns of ``rows`` responses of so many tokens, each as likely as any other."""
    ends = torch.arange(rows + 1)
    return {
        "response_ids": Packed(torch.randint(3, vocabulary, (rows * tokens,)), ends * tokens),
        "rollout_logprobs": Packed(
            torch.full((rows * tokens,), -math.log(vocabulary - 3)), ends * tokens
        ),
        "versions": Packed(torch.tensor([version, tokens] * rows), ends * 2),
        "truncated": torch.ones(rows, dtype=torch.bool),
    }


async def main(url: str, run: str, worker: str) -> None:
    async with ExternalStage.connect(url, run, "rollout", worker=worker) as stage:
        version = -1
        vocabulary = 0
        while True:
            if newer := await stage.weights(version, wait=0 if vocabulary else 30):
                version, weights = newer
                vocabulary = (
                    49 if "head.weight" in weights else len(weights["model.embed_tokens.weight"])
                )
                await stage.weight_sync_notify(version)
            try:
                got = await stage.get_experience(2, wait=5)
                if got.over:
                    return
                if got:
                    tokens = int(got.sampling["max_tokens"])
                    await stage.put_experience(
                        got, respond(len(got.rows), version, vocabulary, tokens)
                    )
            except (WeightsTooOld, LeaseLost):
                continue


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
