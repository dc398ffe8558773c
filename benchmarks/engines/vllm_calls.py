"""Times vLLM for rollout.py, in an interpreter that has vLLM and nothing of ours.

    one JSON line in:  {"prompts": [[token, …], …], "group": rows per prompt, "tokens": new tokens per row}
    one JSON line out: {"seconds": …, "cpu": processor seconds, "tokens": [[token, …], …]}, a prompt's rows together

The engine runs inside this process, so that nothing of it spins while another arm has its turn.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a directory in Hugging Face format")
    parser.add_argument("--rows", type=int, required=True, help="rows in flight at most")
    parser.add_argument("--context", type=int, required=True, help="tokens of the longest row")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout

    from vllm import LLM, SamplingParams

    engine = LLM(
        model=args.model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=args.rows,
        max_model_len=args.context,
        max_num_batched_tokens=max(4096, args.context),
        enable_prefix_caching=True,
        # the least there is; by default 128 on CPU: a shorter prompt would not be shared
        block_size=32,
        disable_log_stats=True,
    )
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(
            n=1, temperature=0.0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False
        )
        prompts = [
            {"prompt_token_ids": ids} for ids in asked["prompts"] for _ in range(asked["group"])
        ]
        began = time.perf_counter()
        cpu = time.process_time()
        made = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        cpu = time.process_time() - cpu
        engine.reset_prefix_cache()
        tokens = [list(done.outputs[0].token_ids) for done in made]
        print(
            json.dumps({"seconds": seconds, "cpu": cpu, "tokens": tokens}), file=answers, flush=True
        )


if __name__ == "__main__":
    main()
