"""The continuous batch of the torch rollout engine, as its compute thread sees it.

    waiting rows (begun ones first) ─▶ admit: prefill new prompts, extend rows that have tokens, draw one ─▶ rows
    rows ─▶ decode: one token of each ─▶ ended rows leave and are delivered; those of a turn rest

Nothing here is thread-safe: one thread makes all calls. A turn depends on the queue and the rows
alone, so the same submissions give the same batches and the same bits.

Rows that are few may take several tokens a forward: those of their drafts that hold, and the one
after them (:mod:`stages.engines.torch.decoding.drafted`).

On an accelerator the next token's decode is launched before the newest token is read: the host
reads, checks for ends and delivers while the device computes. A token that was launched for a row
that had ended is dropped. A call that changes the batch first reads what was launched.

What fails for several rows together is computed again for each alone. The rows that fail then are
dropped, each with its request, and the others go on; where nothing can be computed any more, the
engine has failed.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch

from stages import device as devices
from stages.engines.drafts import MOST_ROWS
from stages.engines.protocols import (
    AdaptersRemoved,
    Completion,
    GroupRequest,
    RequestRefused,
    Token,
)
from stages.engines.response_text import Decodes
from stages.engines.responses import line_up, response_failed
from stages.engines.torch.decoding.adapters import OWN
from stages.engines.torch.decoding.beginnings import Beginnings, warn_of_one_by_one
from stages.engines.torch.decoding.decoder import NOT_FINITE, TorchDecoder
from stages.engines.torch.decoding.resting import RestingRows
from stages.engines.torch.decoding.rows import (
    Made,
    PendingGroup,
    ResponseRow,
    Submission,
    draw_next,
    read,
)
from stages.engines.torch.sampling.drawing import Drawn

if TYPE_CHECKING:
    from stages.engines.torch.decoding.drafted import DraftedSteps
    from stages.engines.torch.model.matchers import Matchers


class ContinuousBatch:
    """Rows that decode together, at most ``max_rows``, and rows that wait.

    One prefill has at most ``prefill_tokens`` padded tokens, or one prompt; as many tokens of
    earlier requests are fed at once, or those of one row. ``launch_ahead``: launch a token before
    the previous one is read. ``drafted``: the steps of rows that are few.
    """

    def __init__(
        self,
        decoder: TorchDecoder,
        tokenizer: Decodes | None,
        *,
        max_rows: int,
        prefill_tokens: int,
        version: int,
        launch_ahead: bool,
        drafted: DraftedSteps | None = None,
    ) -> None:
        self.decoder = decoder
        self.versions = {OWN: version}  # of the weights, by the name of their adapters
        self.waiting: deque[ResponseRow] = deque()
        self.rows: list[ResponseRow] = []  # in the order of the decoder's rows
        self.resting = RestingRows(decoder)
        self._beginnings = Beginnings(decoder, self.resting)
        self._tokenizer = tokenizer
        self._matchers = cache(self._new_matchers)
        self._max_rows = max_rows
        self._prefill_tokens = prefill_tokens
        self._launch_ahead = launch_ahead
        self._drafted = drafted
        self._launched: Drawn | None = None  # a token of every row that has not been read

    def step(self) -> None:
        """Start waiting rows if there is room for one, else make one more token of every row."""
        if self.waiting and len(self.rows) < self._max_rows:
            self.read_launched()
        if not self._admit():
            self._decode()

    def submit(self, rows: Sequence[ResponseRow]) -> None:
        for row in rows:
            self._beginnings.share_group(row)
        line_up(self.waiting, rows)
        for name in {row.request.adapters for row in rows} - self.versions.keys():
            self._fail_adapters(name)

    def abort(self, submission: Submission) -> None:
        """Remove the rows of ``submission``."""
        dropped = [row for row in self.waiting if row.submission is submission]
        self.waiting = deque(row for row in self.waiting if row.submission is not submission)
        for row in dropped:
            self._beginnings.leave(row.group)
        for number in reversed(range(len(self.rows))):
            if self.rows[number].submission is submission:
                self._remove(number)

    def cut(self) -> None:
        """Deliver every row that has a token of this claim, unfinished."""
        for row in self.rows:
            row.ended = "cut"
        self._deliver_ended()

    def sleep(self) -> None:
        """Cut, and free the device's memory.

        Waiting rows stay; their prompts are prefilled again with the next weights.
        """
        self.cut()
        self.resting.clear()
        for row in self.waiting:
            row.group.prompt = row.group.logits = None
        self._clear()
        devices.release_cached(self.decoder.device)

    def fail(self, error: Callable[[], Exception]) -> None:
        """Deliver ``error()`` to every submission and remove all rows."""
        for submission in {
            id(row.submission): row.submission for row in [*self.rows, *self.waiting]
        }.values():
            submission.deliver([error()])
        self.rows.clear()
        self.waiting.clear()
        self._launched = None
        self.resting.clear()
        self._clear()

    def _clear(self) -> None:
        self.decoder.clear()
        if self._drafted is not None and self._drafted.model is not None:
            self._drafted.model.clear()

    def become(self, version: int, adapters: str = OWN) -> None:
        """Take note that the weights of the set ``adapters`` are those of ``version`` now: what was
        computed with them before is not used for rows that start."""
        self.versions[adapters] = version
        self.resting.clear(adapters)
        for row in [*self.waiting, *self.rows]:
            if adapters in (OWN, row.request.adapters):
                self._beginnings.release_prompt(row.group)

    def version_of(self, request: GroupRequest) -> int:
        """Return the version of the weights of ``request``. Raises AdaptersRemoved."""
        try:
            return self.versions[request.adapters]
        except KeyError:
            raise _removed(request.adapters) from None

    def remove_adapters(self, name: str) -> None:
        """Forget the set ``name``; requests with it fail. Raises KeyError."""
        if name == OWN:
            raise KeyError(name)
        del self.versions[name]
        self._fail_adapters(name)
        self.resting.clear(name)
        self.decoder.remove_adapters(name)

    def _fail_adapters(self, name: str) -> None:
        rows = [row for row in [*self.rows, *self.waiting] if row.request.adapters == name]
        for submission in {id(row.submission): row.submission for row in rows}.values():
            submission.deliver([_removed(name)])
            self.abort(submission)

    def read_launched(self) -> None:
        """Append the launched token to its rows and deliver those that end."""
        launched = self._launched
        self._launched = None
        if launched is not None:
            self._append(0, read(launched))
            self._deliver_ended()

    def _admit(self) -> bool:
        """Start waiting rows in order, as far as rows and the tokens of one prefill allow.

        Returns whether any started.
        """
        count = min(len(self.waiting), self._max_rows - len(self.rows))
        new: list[PendingGroup] = []
        longest = fed = 0
        for i, row in enumerate(itertools.islice(self.waiting, count)):
            resting = self.resting.of(row)
            fed += len(row.tokens) - (resting.shared(row) if resting else 0)
            if fed > self._prefill_tokens and i:
                count = i
                break
            group = row.group
            if group in new or self._beginnings.take_prompt(row):
                row.cached_tokens = len(group.ids)
                continue
            longest = max(longest, len(group.ids))
            if new and longest * (len(new) + 1) > self._prefill_tokens:
                count = i
                break
            new.append(group)
        if not count:
            return False
        if not self._prefill_or_refuse(new):
            return True
        started = [self.waiting.popleft() for _ in range(count)]
        first = len(self.rows)
        self.rows += started
        for row in started:
            self._beginnings.join(row)
        logits = self._beginnings.logits(self.rows, first)
        for row in started:
            if not row.request.is_repeated:
                self._beginnings.leave(row.group)
        self._append(first, self._draw_first(started, logits))
        self._deliver_ended()
        return True

    def _draw_first(
        self, rows: Sequence[ResponseRow], logits: Sequence[torch.Tensor | Exception]
    ) -> Sequence[Made | Exception]:
        logits = [self._started(row, each) for row, each in zip(rows, logits, strict=True)]
        whole = [each for each in logits if not isinstance(each, Exception)]
        try:
            if len(whole) == len(rows):
                return read(draw_next(rows, torch.stack(whole)))
        except Exception as error:
            warn_of_one_by_one(error)
        return [
            each if isinstance(each, Exception) else self._draw_alone(row, each)
            for row, each in zip(rows, logits, strict=True)
        ]

    def _started(
        self, row: ResponseRow, logits: torch.Tensor | Exception
    ) -> torch.Tensor | Exception:
        """Return ``logits`` of the first token of ``row``, or the error with which it cannot
        start."""
        if isinstance(logits, Exception):
            return logits
        try:
            row.start(logits, self._matchers)
        except Exception as error:
            return error
        return logits

    def _new_matchers(self) -> Matchers:
        from stages.engines.torch.model.matchers import Matchers

        return Matchers(self._tokenizer, self.decoder.vocabulary)

    def _prefill_or_refuse(self, groups: list[PendingGroup]) -> bool:
        """Prefill ``groups``, together or each alone.

        Those that fail leave the queue; returns whether none has.
        """
        try:
            self._beginnings.prefill(groups)
            return True
        except Exception as error:
            warn_of_one_by_one(error)
        failures: list[tuple[PendingGroup, Exception]] = []
        for group in groups:
            try:
                self._beginnings.prefill([group])
            except Exception as error:
                failures.append((group, error))
        if failures:
            self._check_decoder(failures[0][1])
        for group, failure in failures:
            for row in [row for row in self.waiting if row.group is group]:
                self._refuse(row, failure)
        return not failures

    def _check_decoder(self, error: Exception) -> None:
        """Raise ``error``, with which a row failed, where the decoder fails whatever it is
        given."""
        try:
            self.decoder.check()
        except Exception:
            raise error from None

    def _refuse(self, row: ResponseRow, error: Exception) -> None:
        """Drop the request of ``row``, which failed with ``error``."""
        row.submission.deliver([response_failed(error)])
        self.abort(row.submission)

    def _decode(self) -> None:
        """Launch one more token of every row, and read it unless the next one can be launched
        first."""
        if self._drafted is None or len(self.rows) > MOST_ROWS or not self._decode_drafts():
            self._decode_one()

    def _decode_one(self) -> None:
        if not self.rows:
            return
        before = self._launched
        fed = before.tokens if before else torch.tensor([row.tokens[-1] for row in self.rows])
        cached = [row.length for row in self.decoder.rows]
        try:
            launched = draw_next(self.rows, self.decoder.decode(fed), before)
        except Exception as error:
            warn_of_one_by_one(error)
            for decoder_row, length in zip(self.decoder.rows, cached, strict=True):
                decoder_row.length = length
            self.read_launched()
            self._decode_each()
            return
        if self.decoder.routing is not None:
            for row, chosen in zip(self.rows, self.decoder.routing.split(1), strict=True):
                row.routing.append(chosen)
        finished = before is not None and self._append(0, read(before))
        self._launched = launched
        if finished or not self._launch_ahead or self._next_may_end():
            self.read_launched()

    def _decode_drafts(self) -> bool:
        """Append to each row those tokens of its draft that are drawn, and the one after them.

        Returns whether any row had a draft.
        """
        assert self._drafted is not None
        self.read_launched()
        tokens_of_rows = self._drafted.make(self.rows)
        for place in range(max(map(len, tokens_of_rows), default=0)):
            self._append(0, [made[place] if place < len(made) else None for made in tokens_of_rows])
        if tokens_of_rows:
            self._drafted.settle(self.rows)
            self._deliver_ended()
        return bool(tokens_of_rows)

    def _decode_each(self) -> None:
        """Make one more token of every row, each in a forward of its own."""
        self._append(0, [self._decode_alone(number) for number in range(len(self.rows))])
        self._deliver_ended()

    def _decode_alone(self, number: int) -> Made | Exception:
        row = self.rows[number]
        try:
            with self.decoder.alone(number):
                logits = self.decoder.decode(row.tokens[-1:])
            if self.decoder.routing is not None:
                row.routing.append(self.decoder.routing)
        except Exception as error:
            return error
        return self._draw_alone(row, logits[0])

    def _next_may_end(self) -> bool:
        """Return whether the launched token may be a row's last one, or decides which may follow
        it; then nothing is launched beyond it."""
        return any(row.matcher or len(row.tokens) + 1 >= row.limit for row in self.rows)

    def _draw_alone(self, row: ResponseRow, logits: torch.Tensor) -> Made | Exception:
        """Draw the next token of ``row`` from ``logits`` [V].

        Returns the error with which that fails.
        """
        try:
            (result,) = read(draw_next([row], logits[None].clone()))
        except Exception as error:
            return error
        return result

    def _append(self, first: int, made: Sequence[Made | Exception | None]) -> bool:
        """Append the ``made`` tokens to the rows from number ``first`` on that have not ended.

        Returns whether any ends.
        """
        ended = False
        streamed = dict[int, tuple[Submission, list[Token]]]()
        for row, result in zip(self.rows[first:], made, strict=True):
            if row.done or result is None:
                continue
            try:
                token = self._extend(row, result)
            except Exception as error:
                row.failure = error
            else:
                if row.submission.alternatives is not None:
                    streamed.setdefault(id(row.submission), (row.submission, []))[1].append(token)
            ended = ended or row.done
        for submission, new in streamed.values():
            submission.deliver(new)
        return ended

    def _extend(self, row: ResponseRow, made: Made | Exception) -> Token:
        """Append to ``row`` its token, and say in ``row.ended`` whether it is the last one.

        Raises where it cannot.
        """
        if isinstance(made, Exception):
            raise made
        (token, *others), (logprob, *logprobs) = made
        if math.isnan(logprob):
            raise _no_token(row)
        version = self.version_of(row.request)
        row.append(token, logprob, version)
        row.ended = row.finish_reason(self._tokenizer)
        count = len(row.request.params.logprob_token_ids) or row.submission.alternatives or 0
        likeliest = list(zip(others, logprobs, strict=True))[:count]
        # tokens that pad the head have no probability
        possible = tuple(alternative for alternative in likeliest if alternative[1] > -math.inf)
        return Token(row.request.group, row.place, token, logprob, version, possible)

    def _deliver_ended(self) -> None:
        failed = [(row, row.failure) for row in self.rows if row.failure is not None]
        if failed:
            self._check_decoder(failed[0][1])
        results: dict[int, tuple[Submission, list[Completion | Exception]]] = {}
        for row in self.rows:
            if row.ended is not None:
                results.setdefault(id(row.submission), (row.submission, []))[1].append(
                    row.completion(row.ended)
                )
        for submission, completions in results.values():
            submission.deliver(completions)
        for row, error in failed:
            self._refuse(row, error)
        for number in reversed(range(len(self.rows))):
            row = self.rows[number]
            if row.ended is None:
                continue
            if self._drafted is not None and row.ended != "cut":
                self._drafted.drafts.keep(row)
            if row.request.is_continued and self.decoder.routing is None:
                self.resting.rest(number, row)
            self._remove(number)

    def _remove(self, number: int) -> None:
        self.decoder.leave(number)
        row = self.rows[number]
        last = self.rows.pop()
        if number < len(self.rows):
            self.rows[number] = last
        if row.request.is_repeated:
            self._beginnings.leave(row.group)


def _removed(name: str) -> AdaptersRemoved:
    return AdaptersRemoved(f"the adapters {name!r} were removed")


def _no_token(row: ResponseRow) -> ValueError:
    """Return the error of a row whose next token has no probability."""
    if row.processed is None and row.matcher is None:
        return ValueError(NOT_FINITE)
    problem = "the request allows no token that the model has, or its logits are not finite"
    fix = "allow more by structured_outputs, allowed_token_ids, bad_words or min_tokens"
    field = "allowed_token_ids" if row.matcher is None else "structured_outputs"
    return RequestRefused(row.request.group, field, problem, fix)
