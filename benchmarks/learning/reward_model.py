"""Train a reward model on preference pairs: a sequence classifier with one label, for the recipe
``judge``.

    python -m benchmarks.learning.reward_model --out reward-model
    python -m benchmarks.learning.trials judge --over seed=0 --set reward.processes=1 \\
      --set "reward.functions=[{name='reward_model', options={model='$PWD/reward-model'}}]"

    pairs ─▶ classifier on the base model ─▶ -log sigmoid(chosen - rejected) ─▶ DIR
                                             held-out pairs ─▶ accuracy

The loss is that of Bradley and Terry, as in InstructGPT (arXiv 2203.02155, equation 1). By default
the pairs are those of the recipe ``preferences``, which prefer short answers.
"""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import harness
from stages.rewards.judge import conversation_ids

if TYPE_CHECKING:
    import torch

PAIRS = Path(__file__).resolve().parents[2] / "recipes" / "data" / "preferences.jsonl"


def margin(tokenizer: Any, classifier: Any, pair: dict[str, str]) -> torch.Tensor:
    """Return the score of the chosen response less that of the rejected one: float, 0-d."""
    import torch

    chosen, rejected = (
        classifier(torch.tensor([conversation_ids(tokenizer, pair["prompt"], pair[which])]))
        for which in ("chosen", "rejected")
    )
    return chosen.logits[0, 0] - rejected.logits[0, 0]


def accuracy(tokenizer: Any, classifier: Any, pairs: list[dict[str, str]]) -> float:
    """Return the share of ``pairs`` in which the chosen response has the higher score."""
    import torch

    with torch.inference_mode():
        return statistics.fmean(bool(margin(tokenizer, classifier, pair) > 0) for pair in pairs)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--base", default="smollm2", help="a checkpoint's folder, or smollm2")
    parser.add_argument("--pairs", type=Path, default=PAIRS, help="JSON lines, as of `preferences`")
    parser.add_argument("--out", type=Path, required=True, help="folder of the reward model")
    parser.add_argument("--held-out", type=float, default=0.2, help="share of the pairs")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="pairs of an optimizer step")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pairs = [json.loads(line) for line in options.pairs.read_text().splitlines()]
    order = random.Random(options.seed)
    order.shuffle(pairs)
    held_out = pairs[: round(len(pairs) * options.held_out)]
    trained = pairs[len(held_out) :]
    if not held_out or not trained:
        parser.error(
            f"--held-out: {options.held_out} of {len(pairs)} pairs leaves {len(trained)} to train "
            f"on and {len(held_out)} to judge by; give a share that leaves both"
        )

    import torch
    from torch.nn.functional import logsigmoid
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from stages.model.load import model_folder

    torch.manual_seed(options.seed)
    base = model_folder(options.base)
    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    classifier = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=1, dtype=torch.float32, local_files_only=True
    )
    before = accuracy(tokenizer, classifier, held_out)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=options.learning_rate)
    losses = []
    for epoch in range(1, options.epochs + 1):
        order.shuffle(trained)
        of_epoch = []
        for at in range(0, len(trained), options.batch):
            batch = trained[at : at + options.batch]
            margins = torch.stack([margin(tokenizer, classifier, pair) for pair in batch])
            loss = -logsigmoid(margins).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            of_epoch.append(loss.item())
        losses += of_epoch
        print(f"epoch {epoch}: loss {statistics.fmean(of_epoch):.3f}")
    result = {
        "trained_pairs": len(trained),
        "held_out_pairs": len(held_out),
        "accuracy_before": before,
        "accuracy": accuracy(tokenizer, classifier, held_out),
        "losses": losses,
    }
    print(f"held-out pairs that are ranked right: {before:.2f} → {result['accuracy']:.2f}")
    classifier.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    if options.json:
        options.json.write(result)


if __name__ == "__main__":
    main()
