"""Draft tokens without a model: what followed the same tokens before, in the row itself, in other
responses to its prompt, or in those of earlier epochs. And how long drafts are, also a model's
(:mod:`stages.engines.torch.draft_model`).

    last tokens of a row ─▶ where they stood before ─▶ the place with the longest agreement ─▶ what followed there: the draft
    newest token + draft ─▶ one forward ─▶ a draw at each place, as without a draft ─▶ kept up to the first that differs

Each token is drawn with its own random number from the model's own distribution, so a draft changes
how many tokens a forward makes, and no token (but for rounding). A forward of few tokens takes the
time that reading the weights takes, so tokens of a draft cost little there. How long a draft is
follows from the rows that decode, and from the share of earlier drafts that held.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from stages.engines.responses import ResponseInProgress

GRAM = 2  # tokens by which places are found
LONGEST = 16  # tokens of an agreement that are compared
PLACES = 8  # of the same tokens that are kept, the newest
MOST_DRAFTED = 16  # tokens
# A forward of so many tokens computes as long as it reads the weights. A CPU needs the fewest.
READ_TOKENS = 8
MARGIN = 1.25  # by which a draft is worth more than it costs
MOST_ROWS = 16  # that decode; a draft of more is hardly worth its cost, and none is sought
TEXTS = 32  # of one prompt that are kept, the newest
MOST_TOKENS = 1 << 22  # of all texts
MOST_INDEXED = 64  # prompts
# One draft is tried in so many steps in which none is worth its cost, as this may have changed.
TRIED_ANYWAY = 32
# Tokens of an agreement, from which on its drafts are counted together; and how many of how many
# tokens held before the first draft.
STRENGTHS = {2: (0.5, 4), 3: (1, 4), 4: (2, 4), 8: (3, 4), 16: (3.5, 4)}
MODEL = 0  # the strength of drafts of a model
REMEMBERED = 512  # tokens of one strength, by which the share that holds is known


@dataclass(frozen=True)
class Draft:
    """``tokens`` that may follow, and the ``strength`` of the agreement before them."""

    tokens: list[int]
    strength: int


@dataclass(eq=False)
class Text:
    """The end of a prompt and a response to it; ``read`` tokens of it are in the index."""

    tokens: list[int]
    read: int = 0


@dataclass(eq=False)
class Past:
    """Ended responses to one prompt, and the index of places after each :data:`GRAM` tokens."""

    texts: deque[Text] = field(default_factory=lambda: deque(maxlen=TEXTS))
    places: dict[tuple[int, ...], deque[tuple[list[int], int]]] = field(default_factory=dict)
    added: int = 0  # texts since the index was begun

    def read(self, text: Text) -> None:
        """Take the tokens of ``text`` that are new into the index."""
        tokens = text.tokens
        for place in range(max(text.read, GRAM), len(tokens)):
            before = tuple(tokens[place - GRAM : place])
            self.places.setdefault(before, deque(maxlen=PLACES)).append((tokens, place))
        text.read = len(tokens)

    def add(self, text: Text) -> None:
        """Keep ``text`` in the place of the oldest one. Texts that are gone leave the index too, a
        few of them later."""
        self.texts.append(text)
        self.added += 1
        if self.added > 2 * TEXTS:
            self.forget()

    def forget(self) -> None:
        """Drop the index, which is made again when it is needed."""
        self.places = {}
        self.added = 0
        for text in self.texts:
            text.read = 0

    def longest_agreement(self, tokens: list[int]) -> tuple[list[int], int, int] | None:
        """Return a text, a place in it, and how many tokens before it agree with the last ones of
        ``tokens``; None where fewer than :data:`GRAM` do."""
        best = None
        for text, place in reversed(self.places.get(tuple(tokens[-GRAM:]), ())):
            most = min(LONGEST, place, len(tokens))
            agreed = next(
                (n for n in range(GRAM, most) if text[place - n - 1] != tokens[-n - 1]), most
            )
            if best is None or agreed > best[2]:
                best = text, place, agreed
            if agreed == LONGEST:
                break
        return best


class Drafts:
    """The drafts of one engine's rows. The same requests in the same order have the same drafts."""

    def __init__(self) -> None:
        self._pasts = OrderedDict[bytes, Past]()  # by prompt, the newest last
        self._indexed = OrderedDict[int, Past]()  # those that have an index, by id
        self._texts = WeakKeyDictionary[ResponseInProgress, Text]()  # of rows that decode
        self._tokens = 0
        first = {**STRENGTHS, MODEL: STRENGTHS[LONGEST]}
        self._held = {strength: held for strength, (held, _) in first.items()}
        self._tried = {strength: float(tried) for strength, (_, tried) in first.items()}
        self._passed = dict.fromkeys(first, 0)

    def of(self, row: ResponseInProgress, rows: int) -> Draft | None:
        """Return what may follow the tokens of ``row`` where it is worth its cost, with ``rows``
        that decode."""
        room = min(row.limit - len(row.tokens) - 1, MOST_DRAFTED)
        if room < 1:
            return None
        past = self._past(row)
        text = self._texts.get(row)
        if text is None:
            text = self._texts[row] = Text(row.request.prompt_ids.tolist())
        text.tokens += row.tokens[len(text.tokens) - len(row.request.prompt_ids) :]
        self._index(past)
        past.read(text)
        if (found := past.longest_agreement(text.tokens)) is None:
            return None
        tokens, place, agreed = found
        strength = max(least for least in STRENGTHS if least <= agreed)
        count = min(self.worth(strength, rows), room)
        return Draft(tokens[place : place + count], strength) if count else None

    def judge(self, draft: Draft, held: int) -> None:
        """Take note that the first ``held`` tokens of ``draft`` were drawn."""
        strength = draft.strength
        self._held[strength] += held
        self._tried[strength] += min(held + 1, len(draft.tokens))
        if self._tried[strength] > REMEMBERED:
            self._held[strength] /= 2
            self._tried[strength] /= 2

    def keep(self, row: ResponseInProgress) -> None:
        """Keep the response of ``row``, which has ended, for later rows with its prompt."""
        past = self._past(row)
        text = Text(row.request.prompt_ids[-LONGEST:].tolist() + row.tokens)
        if len(past.texts) == TEXTS:
            self._tokens -= len(past.texts[0].tokens)
        past.add(text)
        self._tokens += len(text.tokens)
        while self._tokens > MOST_TOKENS and len(self._pasts) > 1:
            _, oldest = self._pasts.popitem(last=False)
            self._indexed.pop(id(oldest), None)
            self._tokens -= sum(len(text.tokens) for text in oldest.texts)

    def worth(self, strength: int, rows: int, cost: float = 0.0) -> int:
        """Return how many tokens of a draft are worth their cost: the last one is drawn with at
        least the probability with which its time makes a token of another row. ``cost``: forwards
        that a token of the draft takes before."""
        holds = self._held[strength] / self._tried[strength]
        least = min(MARGIN * (rows / (rows + READ_TOKENS) + cost), 1.0)
        if holds >= 1.0:
            return MOST_DRAFTED
        if holds >= least:
            return int(math.log(least) / math.log(holds))
        self._passed[strength] += 1
        return int(self._passed[strength] % (TRIED_ANYWAY * rows) == 0)

    def _past(self, row: ResponseInProgress) -> Past:
        key = row.request.prompt_ids.cpu().numpy().tobytes()
        past = self._pasts.setdefault(key, Past())
        self._pasts.move_to_end(key)
        return past

    def _index(self, past: Past) -> None:
        for text in past.texts:
            if text.read < len(text.tokens):
                past.read(text)
        self._indexed[id(past)] = past
        self._indexed.move_to_end(id(past))
        if len(self._indexed) > MOST_INDEXED:
            _, oldest = self._indexed.popitem(last=False)
            oldest.forget()
