"""What a trajectory with branches costs in training: packed as a tree, and as a plain row for each
branch, with which its gradient is compared.

    python -m benchmarks.training.branches [--shared 32 256] [--branches 2 4 8] [--own 32] [--rows 2] [--json FILE]

Each trajectory of a group has ``--branches`` branches. They share the first ``--shared`` tokens, and
each has ``--own`` tokens more. The model is a small Llama in float64, on two threads.

    tokens     that the model is fed
    seconds    of the processors, for a forward and backward pass, the best of three
    gradient   the difference of the two gradients over their size
"""

from __future__ import annotations

import time
from typing import Any

import torch
from tensordict import TensorDict
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import harness
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.branches import branches_of
from stages.engines.torch.train import TorchTrainEngine
from stages.flow.catalogue import BRANCHES, MASK

PROMPT = 64
VOCABULARY = 512
REPEATS = 3


def trajectories(shared: int, branches: int, own: int, rows: int) -> TensorDict:
    """A group: the tokens, and where its branches begin. The last half of a branch is generated."""
    length = shared + branches * own
    begins = range(shared + own, length, own)
    mask = torch.zeros(length, dtype=torch.bool)
    mask[shared:] = (torch.arange(branches * own) % own) >= own // 2
    columns: dict[str, list[torch.Tensor]] = {
        "prompt_ids": [torch.arange(PROMPT)] * rows,
        "response_ids": [torch.randint(VOCABULARY, (length,)) for _ in range(rows)],
        "rollout_logprobs": [torch.randn(length) * 0.1 - 6 for _ in range(rows)],
        MASK: [mask] * rows,
        BRANCHES: [torch.tensor([n for begin in begins for n in (begin, shared)])] * rows,
    }
    return _batch(columns, torch.zeros(rows, dtype=torch.int64), torch.randn(rows))


def plain_rows(batch: TensorDict) -> TensorDict:
    """A row for each branch, with all tokens of its path, of which its own are trained."""
    columns: dict[str, list[torch.Tensor]] = {"prompt_ids": []}
    advantages = []
    unbound = {name: batch[name].unbind() for name in ("response_ids", "rollout_logprobs", MASK)}
    for row, column in enumerate(batch[BRANCHES].unbind()):
        for branch in branches_of(column.tolist(), len(unbound["response_ids"][row])):
            path = branch.path()
            for name, rows in unbound.items():
                columns.setdefault(name, []).append(rows[row][path].clone())
            columns[MASK][-1][: branch.depth] = False
            columns["prompt_ids"].append(batch["prompt_ids"].unbind()[row])
            advantages.append(batch["advantage"][row])
    return _batch(columns, torch.zeros(len(advantages), dtype=torch.int64), torch.stack(advantages))


def _batch(
    columns: dict[str, list[torch.Tensor]], group: torch.Tensor, advantage: torch.Tensor
) -> TensorDict:
    rows = TensorDict({}, batch_size=[len(group)])
    for name, column in columns.items():
        rows[name] = torch.nested.nested_tensor(column, layout=torch.jagged)
    rows["group"] = group
    rows["place"] = torch.arange(len(group))
    rows["advantage"] = advantage
    return rows


def step_of(batch: TensorDict) -> tuple[int, float, torch.Tensor]:
    """The tokens that are fed, the seconds of a step, and its gradient."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    model: Any = LlamaForCausalLM(config).double()
    engine = TorchTrainEngine(
        model, learning_rate=1e-3, total_steps=1, device="cpu", threads=2, token_budget=8192
    )
    algorithm = GRPO(correction="none")
    _, mini_batches = engine.prepare(batch, algorithm)
    seconds = []
    fed = 0.0
    for _ in range(REPEATS):
        engine.forget_gradients()
        began = time.process_time()
        fed = sum(engine.forward_backward(part, algorithm)["fed_tokens"] for part in mini_batches)
        seconds.append(time.process_time() - began)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    engine.close()
    return int(fed), min(seconds), gradient


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--shared", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--branches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--own", type=int, default=32)
    parser.add_argument("--rows", type=int, default=2)
    asked = parser.parse_args()
    cases = []
    print(
        "| shared | branches | tokens: tree | plain rows | processor seconds: tree | plain rows | gradient |"
    )
    print("|---|---|---|---|---|---|---|")
    for shared in asked.shared:
        for branches in asked.branches:
            torch.manual_seed(1)
            batch = trajectories(shared, branches, asked.own, asked.rows)
            tree_tokens, tree_seconds, gradient = step_of(batch)
            tokens, seconds, expected = step_of(plain_rows(batch))
            difference = float((gradient - expected).norm() / expected.norm())
            cases.append(
                {
                    "shared": shared,
                    "branches": branches,
                    "tree": {"tokens": tree_tokens, "seconds": tree_seconds},
                    "plain_rows": {"tokens": tokens, "seconds": seconds},
                    "gradient_difference": difference,
                }
            )
            print(
                f"| {shared} | {branches} | {tree_tokens:,} | {tokens:,} | {tree_seconds:.2f} "
                f"| {seconds:.2f} | {difference:.0e} |",
                flush=True,
            )
    if asked.json:
        asked.json.write(cases)


if __name__ == "__main__":
    main()
