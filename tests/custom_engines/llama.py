"""Somebody else's rollout engine: a Llama in numpy, in a process of its own that knows a run by its
HTTP interface alone.

    python llama.py http://127.0.0.1:8765 RUN WORKER

It imports nothing of AsyncDock and no torch. What it is asked for by number (heads, rope) is that
of the `tiny` model.
"""

import json
import sys
import time
import urllib.error
import urllib.request
from itertools import pairwise

import numpy as np
from safetensors.numpy import load, save

BINARY = "application/octet-stream"
HEADS = 4
KV_HEADS = 2
THETA = 10000.0
EPSILON = 1e-6


def call(url, method, body=None, accept="application/json"):
    """The answer to a request, read; a server that is not there now is asked again."""
    kind, data = (
        (BINARY, body)
        if isinstance(body, bytes)
        else ("application/json", json.dumps(body).encode())
    )
    headers = {"Accept": accept} | ({"Content-Type": kind} if body is not None else {})
    request = urllib.request.Request(
        url, data if body is not None else None, headers, method=method
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(request, timeout=90) as answer:
                read = answer.read()
                return (
                    json.loads(read)
                    if answer.headers.get_content_type() == "application/json"
                    else read
                )
        except urllib.error.HTTPError:
            raise
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def logits(w, ids):
    """float32 [V] of the token after ``ids``."""
    x = w["model.embed_tokens.weight"][ids]
    size = w["model.layers.0.self_attn.q_proj.weight"].shape[0] // HEADS
    angles = np.outer(np.arange(len(ids)), THETA ** -(np.arange(0, size, 2) / size))
    cos, sin = (np.concatenate([f(angles)] * 2, 1).astype(np.float32) for f in (np.cos, np.sin))
    future = np.triu(np.full((len(ids), len(ids)), -np.inf, np.float32), 1)
    for layer in range(sum(name.endswith("q_proj.weight") for name in w)):
        at = f"model.layers.{layer}."
        normed = norm(x, w[at + "input_layernorm.weight"])
        q, k, v = (normed @ w[f"{at}self_attn.{name}_proj.weight"].T for name in "qkv")
        out = []
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            mine = slice(head * size, (head + 1) * size)
            theirs = slice(shared * size, (shared + 1) * size)
            scores = (
                turned(q[:, mine], cos, sin) @ turned(k[:, theirs], cos, sin).T / np.sqrt(size)
                + future
            )
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out.append(weights / weights.sum(1, keepdims=True) @ v[:, theirs])
        x = x + np.concatenate(out, 1) @ w[at + "self_attn.o_proj.weight"].T
        normed = norm(x, w[at + "post_attention_layernorm.weight"])
        gate = normed @ w[at + "mlp.gate_proj.weight"].T
        gated = gate / (1 + np.exp(-gate)) * (normed @ w[at + "mlp.up_proj.weight"].T)
        x = x + gated @ w[at + "mlp.down_proj.weight"].T
    return norm(x[-1:], w["model.norm.weight"])[0] @ w["model.embed_tokens.weight"].T


def norm(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * weight


def turned(x, cos, sin):
    a, b = np.split(x, 2, 1)
    return x * cos + np.concatenate([-b, a], 1) * sin


def respond(weights, prompt, sampling, random):
    """Tokens, their logprobs, and whether they were cut off."""
    ids = list(prompt)
    logprobs = []
    while len(logprobs) < sampling["max_tokens"]:
        row = logits(weights, np.array(ids)).astype(np.float64) / sampling["temperature"]
        row -= row.max() + np.log(np.exp(row - row.max()).sum())
        ids.append(int(random.choice(len(row), p=np.exp(row) / np.exp(row).sum())))
        logprobs.append(row[ids[-1]])
        if ids[-1] in sampling["stop_token_ids"]:
            break
    made = ids[len(prompt) :]
    return made, logprobs, made[-1] not in sampling["stop_token_ids"]


def ragged(name, rows, dtype):
    values = np.array([value for row in rows for value in row], dtype)
    return {name: values, f"{name}.offsets": np.cumsum([0, *map(len, rows)], dtype=np.int64)}


def main(server, run, worker):
    here = f"{server}/v1/runs/{run}"
    version = -1
    weights = {}
    random = np.random.default_rng()
    while True:
        try:
            newest = call(f"{here}/weights?after={version}&wait={0 if weights else 30}", "GET")
            if newest["version"] is not None:
                began = time.monotonic()
                weights = load(call(f"{here}/weights/{newest['version']}", "GET"))
                version = newest["version"]
                told = {"worker": worker, "version": version, "exposed": time.monotonic() - began}
                call(f"{here}/weights/notify", "POST", told)
            asked = {
                "stage": "rollout",
                "worker": worker,
                "count": 2,
                "version": version,
                "wait": 5,
            }
            got = call(
                f"{here}/experience/get",
                "POST",
                asked if weights else {**asked, "version": 0},
                BINARY,
            )
            told = json.loads(
                json.loads(got[8 : 8 + int.from_bytes(got[:8], "little")])["__metadata__"][
                    "asyncdock"
                ]
            )
            if told["over"]:
                return
            if told["token"] is None:
                continue
            columns = load(got)
            rows = told["rows"]
            prompts = [
                columns["prompt_ids"][a:b] for a, b in pairwise(columns["prompt_ids.offsets"])
            ]
            made = [respond(weights, prompt, told["sampling"], random) for prompt in prompts]
            for group in sorted({row["group"] for row in rows}):
                at = [i for i, row in enumerate(rows) if row["group"] == group]
                ids, logprobs, cut = zip(*(made[i] for i in at), strict=True)
                control = json.dumps({"token": told["token"], "rows": [rows[i]["id"] for i in at]})
                body = save(
                    ragged("response_ids", ids, np.int64)
                    | ragged("rollout_logprobs", logprobs, np.float32)
                    | ragged("versions", [[version, len(row)] for row in ids], np.int64)
                    | {"truncated": np.array(cut)},
                    {"asyncdock": control},
                )
                call(f"{here}/experience", "POST", body)
        except urllib.error.HTTPError as refused:
            problem = json.load(refused)["type"].rpartition(":")[2]
            # Somebody else has the rows by now, or a newer version is there: begin with the next.
            if problem not in ("lease-lost", "weights-too-old", "weights-gone", "not-begun"):
                raise


if __name__ == "__main__":
    main(*sys.argv[1:4])
