"""Reward functions that ask a model: a language model behind a URL, or a reward model in the process.

    judge         prompt, completion ─▶ POST URL/chat/completions ─▶ "7" ─▶ 0.7
    reward_model  prompt, completion ─▶ a classifier with one label ─▶ its logit

What the model reads is text; nothing of it is executed. Importing this needs neither torch nor aiohttp.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stages.tasks.tasks import Completions, json_text, text

HIGHEST = 10  # grade
NUMBER = re.compile(r"(?<![\d.-])\d+(?:\.\d+)?")
RUBRIC = "Grade how well the answer does what the question asks: is it right, complete and clear?"
FORM = f"Reply with one number from 0 (useless) to {HIGHEST} (perfect), and with nothing else."
Prompts = Sequence[str | list[dict[str, Any]]]


async def judge(
    prompts: Prompts,
    completions: Completions,
    url: list[str],
    model: list[str],
    rubric: list[str] | None = None,
    api_key_variable: list[str] | None = None,
    max_tokens: list[int] | None = None,
) -> list[float]:
    """Return the grades of a language model behind an OpenAI-compatible server, from 0 to 1.

    ``url``: its address up to ``/v1``. ``rubric``: what a good answer is. ``api_key_variable``: the
    environment variable with its key. ``max_tokens``: longest reply (default: 256; more for a judge
    that thinks first). One request for each row. Raises what aiohttp raises, and ValueError for a
    reply without a grade: the row is then asked again, up to ``reward.retries`` times.
    """
    import aiohttp

    grades = []
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        for at, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            system = f"{rubric[at] if rubric else RUBRIC}\n{FORM}"
            question = f"Question:\n{conversation_text(prompt)}\n\nAnswer:\n{text(completion)}"
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": f"{question}\n\n{FORM}"},
            ]
            most = max_tokens[at] if max_tokens else 256
            body = {"model": model[at], "messages": messages, "temperature": 0, "max_tokens": most}
            headers = _authorization(api_key_variable[at] if api_key_variable else "")
            address = f"{url[at].rstrip('/')}/chat/completions"
            async with session.post(address, json=body, headers=headers) as response:
                grades.append(grade_of(await response.json()))
    return grades


def _authorization(variable: str) -> Mapping[str, str]:
    if not variable:
        return {}
    if not (key := os.environ.get(variable)):
        raise ValueError(
            f"api_key_variable: {variable!r} is not set; set it, and name it in reward.environment "
            f"where that is given"
        )
    return {"Authorization": f"Bearer {key}"}


def grade_of(answer: Mapping[str, Any]) -> float:
    """Return the grade in an answer of ``/chat/completions``, over :data:`HIGHEST`: the first number
    after the model's thinking. Raises ValueError where there is none from 0 to :data:`HIGHEST`."""
    reply = answer["choices"][0]["message"]["content"] or ""
    number = NUMBER.search(reply.rpartition("</think>")[2])
    if number is None or float(number[0]) > HIGHEST:
        raise ValueError(f"the judge replied {reply!r:.200}, not a number from 0 to {HIGHEST}")
    return float(number[0]) / HIGHEST


def conversation_text(prompt: str | list[dict[str, Any]]) -> str:
    """Return a prompt as one text: of a single message its content, of several with their roles."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return json_text(prompt[0]["content"])
    return "\n".join(f"{message['role']}: {json_text(message['content'])}" for message in prompt)


def reward_model(
    prompts: Prompts,
    completions: Completions,
    model: list[str],
    device: list[str] | None = None,
    max_tokens: list[int] | None = None,
    token_budget: list[int] | None = None,
) -> list[float]:
    """Return the logits of a sequence classifier with one label, as reward models are stored.

    ``model``: its folder. ``device``: such as ``"cuda:1"`` (default: ``"cpu"``). ``max_tokens``: a
    longer conversation is cut at its beginning (default: 4096). ``token_budget``: most tokens of
    one forward pass, with padding (default: 4096). Each process of ``reward.processes`` loads the
    model once. Raises ValueError for a classifier with several labels.
    """
    rows: dict[tuple[str, str, int], dict[int, list[int]]] = {}
    for at, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        where = device[at] if device else "cpu"
        most = max_tokens[at] if max_tokens else 4096
        budget = token_budget[at] if token_budget else 4096
        tokenizer, _ = _load_classifier(model[at], where)
        ids = conversation_ids(tokenizer, prompt, completion)[-most:]
        rows.setdefault((model[at], where, budget), {})[at] = ids
    scores: dict[int, float] = {}
    for (path, where, budget), conversations in rows.items():
        _, classifier = _load_classifier(path, where)
        for batch in _batches(conversations, budget if _pads(classifier) else 1):
            logits = _logits(classifier, [conversations[at] for at in batch])
            scores.update(zip(batch, logits, strict=True))
    return [scores[at] for at in range(len(scores))]


def _pads(classifier: Any) -> bool:
    """Return whether ``classifier`` takes padded rows: with no padding token, one on a causal model
    cannot find the last token of a row."""
    return classifier.config.get_text_config().pad_token_id is not None


def _batches(conversations: Mapping[int, Sequence[int]], budget: int) -> Iterator[list[int]]:
    """Yield the keys of ``conversations`` by length, as many as have ``budget`` tokens when they
    are padded to the longest; at least one."""
    batch: list[int] = []
    for at in sorted(conversations, key=lambda at: len(conversations[at])):
        if batch and (len(batch) + 1) * len(conversations[at]) > budget:
            yield batch
            batch = []
        batch.append(at)
    if batch:
        yield batch


def _logits(classifier: Any, conversations: Sequence[list[int]]) -> list[float]:
    """Return the logit of each conversation; shorter ones are padded at their end, and masked."""
    import torch

    longest = max(map(len, conversations))
    pad = classifier.config.get_text_config().pad_token_id or 0
    padded = [ids + [pad] * (longest - len(ids)) for ids in conversations]
    mask = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in conversations]
    with torch.inference_mode():
        output = classifier(
            torch.tensor(padded, device=classifier.device),
            attention_mask=torch.tensor(mask, device=classifier.device),
        )
    logits: list[float] = output.logits[:, 0].tolist()
    return logits


@functools.lru_cache(maxsize=4)
def _load_classifier(path: str, device: str) -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    classifier = AutoModelForSequenceClassification.from_pretrained(
        path,
        dtype="auto",
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
    )
    if (labels := classifier.config.num_labels) != 1:
        raise ValueError(f"model: {path!r} has {labels} labels; a reward model has one")
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    return tokenizer, classifier.eval().to(device)


def conversation_ids(
    tokenizer: Any, prompt: str | list[dict[str, Any]], completion: Any
) -> list[int]:
    """Return the tokens of a conversation: by the chat template, where there is one."""
    answer = text(completion)
    if not tokenizer.chat_template:
        ids: list[int] = tokenizer(conversation_text(prompt) + answer).input_ids
        return ids
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [*asked, {"role": "assistant", "content": answer}]
    templated: list[int] = tokenizer.apply_chat_template(messages, return_dict=False)
    return templated
