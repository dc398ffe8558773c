"""Reward functions that ask a model: a language model behind a URL, or a reward model in the process.

    judge         prompt, completion ─▶ POST URL/chat/completions ─▶ "7" ─▶ 0.7
    reward_model  prompt, completion ─▶ a classifier with one label ─▶ its logit

What the model reads is text; nothing of it is executed. Importing this needs neither torch nor aiohttp.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
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
) -> list[float]:
    """Return the logits of a sequence classifier with one label, as reward models are stored.

    ``model``: its folder. ``device``: such as ``"cuda:1"`` (default: ``"cpu"``). ``max_tokens``: a
    longer conversation is cut at its beginning (default: 4096). Each process of ``reward.processes``
    loads the model once. Raises ValueError for a classifier with several labels.
    """
    import torch

    scores = []
    for at, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        tokenizer, classifier = _load_classifier(model[at], device[at] if device else "cpu")
        most = max_tokens[at] if max_tokens else 4096
        ids = _conversation_ids(tokenizer, prompt, completion)[-most:]
        with torch.inference_mode():
            logits = classifier(torch.tensor([ids], device=classifier.device)).logits
        scores.append(float(logits[0, 0]))
    return scores


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


def _conversation_ids(
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
