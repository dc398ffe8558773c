"""A judge behind a real HTTP server, and a reward model beside transformers' own forward."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web

from stages.model.load import load_tokenizer
from stages.rewards.judge import FORM, RUBRIC, _batches, grade_of, judge, reward_model

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


class Server:
    """Answers as OpenAI's chat completions do, with the replies that it is given."""

    def __init__(self) -> None:
        self.replies: list[str] = []
        self.requests: list[tuple[str | None, dict[str, Any]]] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append((request.headers.get("Authorization"), await request.json()))
        reply = self.replies.pop(0)
        if reply == "busy":
            return web.Response(status=503)
        return web.json_response({"choices": [{"message": {"content": reply}}]})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    served = Server()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", served.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    served.url = f"http://{host}:{port}/v1"
    yield served
    await runner.cleanup()


async def test_a_grade_is_a_tenth_of_the_reply(server: Server) -> None:
    server.replies = ["7", "Grade: 10", "<think>At most 3, or 4?</think>\n8.5"]
    prompts = ["Why?", [{"role": "user", "content": "Why?"}], "Why?"]
    answers = ["So.", [{"role": "assistant", "content": "So."}], "No."]
    grades = await judge(prompts, answers, [server.url] * 3, ["m"] * 3)  # type: ignore[arg-type]
    assert grades == [0.7, 1.0, 0.85]
    first, second, third = (body for _, body in server.requests)
    assert first == second, "a conversation of one message is its text"
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("m", 0, 256)
    system, user = first["messages"]
    assert system == {"role": "system", "content": f"{RUBRIC}\n{FORM}"}
    assert user["content"] == f"Question:\nWhy?\n\nAnswer:\nSo.\n\n{FORM}"
    assert "Answer:\nNo." in third["messages"][1]["content"]


async def test_rubric_key_and_length_are_options(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.replies = ["1", "1"]
    ask: dict[str, Any] = {"rubric": ["Short?"], "max_tokens": [9], "api_key_variable": ["A_KEY"]}
    monkeypatch.delenv("A_KEY", raising=False)
    with pytest.raises(ValueError, match="api_key_variable: 'A_KEY' is not set"):
        await judge(["q"], ["a"], [server.url + "/"], ["m"], **ask)
    monkeypatch.setenv("A_KEY", "word")
    await judge(["q"], ["a"], [server.url + "/"], ["m"], **ask)
    ((authorization, body),) = server.requests
    assert authorization == "Bearer word"
    assert body["messages"][0]["content"] == f"Short?\n{FORM}"
    assert body["max_tokens"] == 9


async def test_a_judge_that_fails_raises(server: Server) -> None:
    server.replies = ["busy"]
    with pytest.raises(aiohttp.ClientResponseError, match="503"):
        await judge(["q"], ["a"], [server.url], ["m"])


@pytest.mark.parametrize("reply", ["", "good", "11", "-3", "100", None])
def test_a_reply_without_a_grade_is_an_error(reply: str | None) -> None:
    with pytest.raises(ValueError, match="not a number from 0 to 10"):
        grade_of({"choices": [{"message": {"content": reply}}]})


def classifier_in(folder: Path, labels: int, template: str | None) -> Any:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=1, num_labels=labels, **sizes)
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    return model, tokenizer


def test_a_reward_model_scores_the_conversation_as_its_template_writes_it(tmp_path: Path) -> None:
    model, tokenizer = classifier_in(tmp_path, 1, CHAT)
    answers = ["bb", "a much longer one"]
    scores = reward_model(["ab="] * 2, answers, [str(tmp_path)] * 2)
    for answer, score in zip(answers, scores, strict=True):
        ids = tokenizer(f"<user>ab=<assistant>{answer}", add_special_tokens=False).input_ids
        with torch.no_grad():
            assert score == pytest.approx(float(model(torch.tensor([ids])).logits), abs=1e-6)
    conversation = [{"role": "user", "content": "ab="}]
    completion = [{"role": "assistant", "content": "bb"}]
    same = reward_model([conversation], [completion], [str(tmp_path)])
    assert same == [pytest.approx(scores[0])]
    cut = reward_model(["ab="], ["bb"], [str(tmp_path)], max_tokens=[2])
    with torch.no_grad():
        last = tokenizer("bb", add_special_tokens=False).input_ids[-2:]
        assert cut == [pytest.approx(float(model(torch.tensor([last])).logits), abs=1e-6)]


@pytest.mark.parametrize("padding", [None, "<pad>", "the last token"])
def test_conversations_of_one_pass_have_the_scores_of_single_ones(
    padding: str | None, tmp_path: Path
) -> None:
    """Also where the token of the padding is the last one of a conversation, and where none is."""
    model, tokenizer = classifier_in(tmp_path, 1, CHAT)
    last = tokenizer("b", add_special_tokens=False).input_ids[-1]
    pads = {None: None, "<pad>": 0, "the last token": last}
    model.config.pad_token_id = pads[padding]
    model.save_pretrained(tmp_path)
    answers = ["bb", "a much longer one", "", "ab", "a", "one more that is long"]
    path = [str(tmp_path)] * len(answers)
    single = [reward_model(["ab="], [answer], path[:1])[0] for answer in answers]
    assert len(set(single)) > 3
    for budget in (1, 40, 4096):
        together = reward_model(["ab="] * len(answers), answers, path, token_budget=[budget] * 6)
        assert together == pytest.approx(single, abs=1e-6)


def test_an_encoder_scores_conversations_of_one_pass_as_single_ones(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(tokenizer), num_hidden_layers=1, num_labels=1, **sizes)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    answers = ["bb", "a much longer one", "ab"]
    path = [str(tmp_path)] * len(answers)
    single = [reward_model(["ab="], [answer], path[:1])[0] for answer in answers]
    assert reward_model(["ab="] * 3, answers, path) == pytest.approx(single, abs=1e-6)


def test_a_pass_has_no_more_tokens_than_its_budget() -> None:
    lengths = {0: 9, 1: 3, 2: 4, 3: 40, 4: 3}
    rows = {at: [0] * length for at, length in lengths.items()}
    assert list(_batches(rows, 20)) == [[1, 4, 2], [0], [3]]


def test_a_classifier_with_several_labels_is_no_reward_model(tmp_path: Path) -> None:
    classifier_in(tmp_path, 2, None)
    with pytest.raises(ValueError, match="has 2 labels; a reward model has one"):
        reward_model(["q"], ["a"], [str(tmp_path)])
