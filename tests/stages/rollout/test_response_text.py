"""The text of a response as its tokens come: that of all its tokens at once, up to a stop
string."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from stages.engines.response_text import ResponseText
from stages.model.load import tiny_tokenizer


class Bytes:
    """A tokenizer with a token a byte: characters beyond ASCII take several."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(ids).decode(errors="replace")


@given(
    st.text(alphabet="abc é語🎉", max_size=30),
    st.lists(st.text(alphabet="abc 語", min_size=1, max_size=3), max_size=3),
)
@example(" aa", ["a", " aa"])
def test_pieces_add_up_to_the_text_before_the_first_stop_string(
    whole: str, stops: list[str]
) -> None:
    text = ResponseText(Bytes(), stops)
    made = ""
    certain = len(whole)
    for end in range(1, len(whole) + 1):  # the first that is complete ends the response
        begins = [at for stop in stops if (at := whole.find(stop, 0, end)) >= 0]
        if begins:
            certain = min(begins)
            break
    for token in whole.encode():
        made += text.add(token)
        assert whole[:certain].startswith(made), (
            "nothing is returned that may belong to a stop string, or half a character"
        )
        if text.stopped:
            break
    assert made + text.finish() == whole[:certain]
    assert bool(text.stopped) == (certain < len(whole))
    assert whole[certain:].startswith(text.stopped), "it says which one"
    assert text.stopped in ("", *stops)


def test_special_tokens_have_no_text() -> None:
    tokenizer = tiny_tokenizer()
    text = ResponseText(tiny_tokenizer())
    assert (
        "".join(
            text.add(token) for token in [*tokenizer("ab")["input_ids"], tokenizer.eos_token_id]
        )
        == "ab"
    )
    assert (len(text), text.finish()) == (3, "")
