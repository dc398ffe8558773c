"""A program of a user of Tinker's SDK, of any version from 0.25 to 0.38: it knows of no AsyncDock.

TINKER_BASE_URL, TINKER_API_KEY ──▶ every call of the public clients once ──▶ "done" on standard output
"""

from __future__ import annotations

import inspect
import json
import math
import urllib.request
from typing import Any

import tinker
from tinker import types

MODEL = "tiny"
PROMPT = [5, 6, 7, 8]
TOKENS = [9, 10, 11, 12, 13]


def ended(answer: Any) -> Any:
    """A client: SDK 0.38 gives a future of it, earlier ones the client."""
    return answer.result() if hasattr(answer, "result") else answer


def datum(**inputs: Any) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens=TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], **inputs},
    )


def logprobs(output: Any, row: int = 0) -> list[float]:
    return list(output.loss_fn_outputs[row]["logprobs"].data)


def near(left: list[float], right: list[float], tolerance: float = 2e-4) -> bool:
    return len(left) == len(right) and all(
        math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
        for a, b in zip(left, right, strict=True)
    )


def failure_of(future: Any) -> Any:
    try:
        return AssertionError(f"it was not refused: {future.result()}")
    except tinker.RequestFailedError as error:
        return error


def train(trainer: Any) -> None:
    """Losses, a loss of the program's own, and steps that are asked for before answers come."""
    weighted = datum(weights=[0.0, 1.0, 1.0, 2.0])
    before = logprobs(trainer.forward([weighted], "cross_entropy").result())
    first = trainer.forward_backward([weighted, weighted], "cross_entropy").result()
    assert len(first.loss_fn_outputs) == 2
    assert logprobs(first) == logprobs(first, 1) == before
    loss = -2 * sum(w * p for w, p in zip([0.0, 1.0, 1.0, 2.0], before, strict=True))
    assert math.isclose(first.metrics["loss:sum"], loss, rel_tol=1e-5), (first.metrics, loss)
    trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()

    now = logprobs(trainer.forward([weighted], "cross_entropy").result())
    sampled = datum(logprobs=now, advantages=[0.0, 1.0, -1.0, 2.0])
    policy = trainer.forward_backward([sampled], "importance_sampling").result()
    assert math.isclose(policy.metrics["loss:sum"], -2.0, rel_tol=1e-4), policy.metrics
    clipped = trainer.forward_backward(
        [sampled], "ppo", loss_fn_config={"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    )
    step = trainer.optim_step(types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0))
    assert clipped.result().loss_fn_outputs
    assert step.result() is not None

    def own(data: list[Any], scores: list[Any]) -> tuple[Any, dict[str, float]]:
        total = -sum(score.sum() for score in scores)
        return total, {"own": float(total)}

    custom = trainer.forward_backward_custom([datum()], own).result()
    expected = -sum(logprobs(trainer.forward([weighted], "cross_entropy").result()))
    assert math.isclose(custom.metrics["own"], expected, rel_tol=1e-4), custom.metrics
    trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()

    pending = []
    for _ in range(4):
        pending.append(trainer.forward_backward([weighted], "cross_entropy"))
        pending.append(trainer.optim_step(types.AdamParams(learning_rate=5e-3)))
    answers = [future.result() for future in pending]
    losses = [answer.metrics["loss:sum"] for answer in answers[::2]]
    assert losses[-1] < losses[0], losses

    failure = failure_of(trainer.forward_backward([weighted], "no_such_loss"))
    assert "no_such_loss" in str(failure), failure
    assert failure.category == types.RequestErrorCategory.User
    dropped = failure_of(trainer.optim_step(types.AdamParams()))
    assert "send the data again" in str(dropped), dropped


def tensor(*values: float) -> types.TensorData:
    return types.TensorData(data=[*values], dtype="float32", shape=[len(values)])


def upload(service: Any, trainer: Any) -> None:
    """A loss that the server computes gives what it gives in the program."""
    if not hasattr(service, "create_custom_loss"):  # from 0.38
        return
    import torch

    def policy(logprobs: Any, advantages: Any, old: Any) -> Any:
        ratio = torch.exp(logprobs - old)
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
        return loss, {"custom/ratio:mean": ratio.detach().mean(), "custom/one:sum": ratio[0]}

    handle = service.create_custom_loss(policy, {"logprobs": 1, "advantages": 1, "old": 1}).result()
    assert handle.loss_id, handle
    data = [
        datum(advantages=tensor(0.5, -1.0, 2.0, scale), old=tensor(-3.0, -3.1, -4.0, -2.9))
        for scale in (0.1, 1.0, -3.0)
    ]

    def own(data: list[Any], scores: list[Any]) -> tuple[Any, dict[str, float]]:
        each = [
            policy(score, *(d.loss_fn_inputs[name].to_torch() for name in ("advantages", "old")))
            for d, score in zip(data, scores, strict=True)
        ]
        ratios = [float(metrics["custom/ratio:mean"]) for _, metrics in each]
        return sum(loss for loss, _ in each), {"custom/ratio:mean": sum(ratios) / len(ratios)}

    one_pass = trainer.forward_backward_custom(data, handle).result()
    first = trainer.optim_step(types.AdamParams(learning_rate=0.0)).result()
    two_passes = trainer.forward_backward_custom(data, own).result()
    second = trainer.optim_step(types.AdamParams(learning_rate=0.0)).result()
    for name in ("loss:sum", "custom/ratio:mean"):
        pair = one_pass.metrics[name], two_passes.metrics[name]
        assert math.isclose(*pair, rel_tol=1e-4), (name, pair)
    assert logprobs(one_pass) == logprobs(two_passes)
    norms = first.metrics["grad_norm"], second.metrics["grad_norm"]
    assert math.isclose(*norms, rel_tol=1e-4), norms


def save(service: Any, trainer: Any) -> str:
    """A state is what the model was, with and without its optimizer."""
    weighted = datum(weights=[1.0, 1.0, 1.0, 1.0])
    saved = logprobs(trainer.forward([weighted], "cross_entropy").result())
    path = trainer.save_state("first").result().path
    assert path.startswith("tinker://"), path
    assert path.endswith("/weights/first"), path
    trainer.forward_backward([weighted], "cross_entropy").result()
    trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    stepped = logprobs(trainer.forward([weighted], "cross_entropy").result())
    assert stepped != saved
    trainer.load_state_with_optimizer(path).result()
    assert logprobs(trainer.forward([weighted], "cross_entropy").result()) == saved

    for create in (
        service.create_training_client_from_state_with_optimizer,
        service.create_training_client_from_state,
    ):
        other = ended(create(path))
        assert logprobs(other.forward([weighted], "cross_entropy").result()) == saved
    return str(path)


def sample(service: Any, trainer: Any) -> None:
    """Samplers of a name, and of no name, and what they say of prompts."""
    prompt = types.ModelInput.from_ints(tokens=PROMPT)
    path = trainer.save_weights_for_sampler("sampler").result().path
    assert path.endswith("/sampler_weights/sampler"), path
    for sampler in (
        ended(service.create_sampling_client(model_path=path)),
        ended(trainer.save_weights_and_get_sampling_client()),
    ):
        answer = sampler.sample(
            prompt=prompt,
            num_samples=4,
            sampling_params=types.SamplingParams(max_tokens=12, stop=[9, 10], seed=3),
        ).result()
        assert len(answer.sequences) == 4
        for sequence in answer.sequences:
            assert len(sequence.logprobs) == len(sequence.tokens) >= 1
            stops = [token for token in sequence.tokens if token in (9, 10)]
            if sequence.stop_reason == "stop":
                assert stops == sequence.tokens[-1:] or not stops, sequence
            else:
                assert (stops, len(sequence.tokens)) == ([], 12), sequence
        scores = sampler.compute_logprobs(prompt).result()
        assert (len(scores), scores[0]) == (len(PROMPT), None)
        passed = trainer.forward(
            [
                types.Datum(
                    model_input=types.ModelInput.from_ints(tokens=PROMPT[:-1]),
                    loss_fn_inputs={"target_tokens": PROMPT[1:], "weights": [1.0, 1.0, 1.0]},
                )
            ],
            "cross_entropy",
        ).result()
        assert near(scores[1:], logprobs(passed)), (scores, logprobs(passed))
        likeliest = sampler.sample(
            prompt=prompt,
            num_samples=1,
            sampling_params=types.SamplingParams(max_tokens=2, temperature=0.0),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=3,
        ).result()
        top = likeliest.topk_prompt_logprobs
        assert (len(top), top[0]) == (len(PROMPT), None)
        assert all(len(cells) == 3 for cells in top[1:]), top
    base = ended(service.create_sampling_client(base_model=MODEL))
    score(base, prompt)
    text = types.SamplingParams(max_tokens=3, temperature=0.0)
    first, second = (base.sample(prompt, 1, text).result().sequences[0].tokens for _ in range(2))
    assert first == second
    if hasattr(base, "get_sampler_handle"):  # from 0.38
        numbers = set()
        for _ in range(2):
            copied = tinker.SamplingClient.from_sampler_handle(base.get_sampler_handle())
            (sequence,) = copied.sample(prompt, 1, text).result().sequences
            assert sequence.tokens == first
            numbers.add(int(sequence.sequence_id.split(":")[-2]) // 10**9)
        assert numbers == {1, 2}, numbers


def score(sampler: Any, prompt: Any) -> None:
    """What newer SDKs ask of a prompt: targets, draws, its last tokens alone."""
    plain = sampler.compute_logprobs(prompt).result()
    asks = inspect.signature(sampler.sample).parameters
    options = {"sampling_params": types.SamplingParams(max_tokens=1, seed=1), "num_samples": 1}
    if "target_prompt_logprobs" in asks:  # from 0.30
        ids = [PROMPT[1], -1, -1, PROMPT[2], -1, -1]
        dense = types.TensorData(data=ids, dtype="int64", shape=[3, 2])
        answer = sampler.sample(prompt, target_prompt_logprobs=dense, **options).result()
        targets = answer.target_prompt_logprobs.tolist()
        assert near([targets[0][0], targets[1][1]], plain[1:3]), (targets, plain)
        assert [targets[0][1], targets[1][0], *targets[2]] == [0.0] * 4, targets
        sparse = types.TensorData(
            data=[PROMPT[3]],
            dtype="int64",
            shape=[3, 100],
            sparse_crow_indices=[0, 0, 0, 1],
            sparse_col_indices=[42],
        )
        answer = sampler.sample(prompt, target_prompt_logprobs=sparse, **options).result()
        target = answer.target_prompt_logprobs
        assert (target.sparse_col_indices, target.shape) == ([42], [3, 100]), target
        assert near(target.data, plain[3:]), (target, plain)
    if "prompt_alt_tokens_k" in asks:  # from 0.31
        alternatives = sampler.sample(prompt, prompt_alt_tokens_k=4, **options).result()
        drawn = alternatives.prompt_alt_tokens
        assert (drawn.tokens.shape, drawn.logprobs.shape) == ([3, 4], [3, 4]), drawn
        assert all(logprob < 0 for logprob in drawn.logprobs.data), drawn
    if "prompt_logprobs_last_n" in asks:  # from 0.33
        last = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=2).result()
        assert last[:2] == [None, None], last
        assert near(last[2:], plain[2:]), (last, plain)


def export(service: Any, trainer: Any) -> None:
    """Weights for other programs, and copies of a checkpoint."""
    if hasattr(trainer, "save_weights_external"):  # from 0.28
        rest = service.create_rest_client()
        path = trainer.save_weights_external("out").result().path
        urls = rest.get_external_weights_urls(path).result().urls
        assert {"adapter_config.json", "model/config.json"} <= set(urls), urls
        with urllib.request.urlopen(urls["adapter_config.json"]) as file:
            assert json.load(file)["r"] == 8
        rest.delete_checkpoint_from_tinker_path(path).result()
    if hasattr(service, "copy_weights"):  # from 0.26
        path = trainer.save_state("source").result().path
        copied = service.copy_weights(path, ttl_seconds=3600).result()
        assert copied.endswith("/weights/source"), copied
        assert copied != path
        service.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
        begun = ended(service.create_training_client_from_state(copied))
        assert begun.get_info().lora_rank == 8


def look(service: Any, trainer: Any, path: str) -> None:
    """The records, and what goes from them."""
    rest = service.create_rest_client()
    model = path.removeprefix("tinker://").partition("/")[0]
    run = rest.get_training_run(model).result()
    assert (run.training_run_id, run.base_model, run.is_lora) == (model, MODEL, True)
    assert (run.lora_rank, run.user_metadata) == (8, {"renderer_name": "plain"}), run
    assert model in [
        each.training_run_id for each in rest.list_training_runs().result().training_runs
    ]
    listed = {
        each.checkpoint_id: each for each in rest.list_checkpoints(model).result().checkpoints
    }
    assert {"weights/first", "sampler_weights/sampler"} <= set(listed), listed
    assert listed["weights/first"].tinker_path == path
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    everywhere = rest.list_user_checkpoints().result().checkpoints
    assert next(each for each in everywhere if each.tinker_path == path).expires_at is not None
    for change, is_public in (
        (rest.publish_checkpoint_from_tinker_path, True),
        (rest.unpublish_checkpoint_from_tinker_path, False),
    ):
        change(path).result()
        everywhere = rest.list_user_checkpoints().result().checkpoints
        assert next(each for each in everywhere if each.tinker_path == path).public is is_public
    weights = rest.get_weights_info_by_tinker_path(path).result()
    assert (weights.base_model, weights.is_lora, weights.lora_rank) == (MODEL, True, 8), weights
    if hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):  # up to 0.35
        address = rest.get_checkpoint_archive_url_from_tinker_path(path).result().url
        with urllib.request.urlopen(address) as archive:
            assert archive.read(512)
    session = model.partition(":")[0]
    assert model in rest.get_session(session).result().training_run_ids
    assert session in rest.list_sessions().result().sessions
    rest.delete_checkpoint_from_tinker_path(path).result()
    left = [each.checkpoint_id for each in rest.list_checkpoints(model).result().checkpoints]
    assert "weights/first" not in left, left


def main() -> None:
    # copies go to a project, of which this server has none
    project = {"project_id": "any"} if hasattr(tinker.ServiceClient, "copy_weights") else {}
    service = tinker.ServiceClient(**project)
    models = [each.model_name for each in service.get_server_capabilities().supported_models]
    assert MODEL in models, models
    trainer = ended(
        service.create_lora_training_client(
            base_model=MODEL, rank=8, user_metadata={"renderer_name": "plain"}
        )
    )
    info = trainer.get_info()
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == (MODEL, True, 8), info
    assert info.model_data.arch == "llama", info
    train(ended(service.create_lora_training_client(base_model=MODEL, rank=0)))
    train(trainer)
    upload(service, trainer)
    path = save(service, trainer)
    sample(service, trainer)
    export(service, trainer)
    look(service, trainer, path)
    if hasattr(service, "__exit__"):  # from 0.29
        service.__exit__(None, None, None)
    print("done")


if __name__ == "__main__":
    main()
