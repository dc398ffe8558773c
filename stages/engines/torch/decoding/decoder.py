"""A Hugging Face causal LM as a decoder of one changing batch of rows.

    prefill([prompt, …]) ─▶ Prompt handles, logits of the first token      (packed: no padding in the linear layers)
    join(prompt)         ─▶ a new last row that shares the prompt's KV (and may bring KV of tokens that it has already)
    extend(rows, tokens) ─▶ logits after the next tokens of some rows      (packed; tokens that earlier requests have made)
    decode([token, …])   ─▶ logits of every row's next token               (all rows in one forward)
    decode_drafts(…)     ─▶ logits after each of several tokens of every row
    leave(row)           ─▶ the last row takes its place; a prompt is freed with its last holder

Attention is :class:`TwoPartAttention`. Everything else is computed by :class:`LlamaForward` for a
Llama-like model, and by the model's own modules, through transformers' attention interface, for any
other. The constructor compares a short sequence with the model's plain forward: a forward that does
not agree is not used, and a model that agrees with neither is refused.

Static steps (on an accelerator): a decode step is padded to one of few sizes and its inputs are
copied into fixed tensors, so that the device can replay a recording of it with a handful of calls
from the host:

    rows 13, prompts 3 of ≤ 5 rows, prompt ≤ 45, own ≤ 20 tokens ─▶ size (16, 4, 8, 64, 64) ─▶ its recording, or record
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stages import device as devices
from stages.adapters.options import AdapterOptions
from stages.engines.torch.decoding.adapters import OWN
from stages.engines.torch.decoding.attention import (
    DecodeStep,
    ExtendStep,
    Extension,
    Pool,
    PrefillStep,
    SharedPrompts,
    TwoPartAttention,
)
from stages.engines.torch.decoding.llama_forward import LlamaForward, can_pack_in, is_llama
from stages.engines.torch.decoding.weights import DecoderWeights, WeightSet
from stages.engines.torch.model.attention import Scores
from stages.engines.torch.model.attention_interface import (
    PROBE,
    check_logits,
    fix_rope,
    replace_attention,
    state_of,
)
from stages.engines.torch.model.logits import use_float32
from stages.resharding.tensors import separate

if TYPE_CHECKING:
    from stages.engines.torch.decoding.adapter_products import AdapterSet
    from stages.engines.torch.model.expert_routing import RoutingRecorder

ATTENTION = "asyncdock_two_part"
NOT_FINITE = "the model's logits are not finite; its weights or its inputs are broken"
PREFILLED = PROBE - 7  # tokens of the comparison with the plain forward that are prefilled
EXTENDED = PREFILLED + 3  # … and fed together after that
ROOM_TOKENS = 32  # the room of a row grows by multiples of it
# smallest sizes of a static step; larger ones are doubled from these
STATIC_ROWS = 8
STATIC_TOKENS = 64


@dataclass(eq=False)
class Prompt:
    """A prefilled prompt: its slot in the pool, its length in tokens, the name of the adapters that
    it was computed with, and the number of its holders."""

    slot: int
    length: int
    adapters: str = OWN
    holders: int = 1


@dataclass(eq=False)
class Row:
    """A response in the batch: its prompt, and how many of its own tokens have keys and values."""

    prompt: Prompt
    length: int = 0


@dataclass(frozen=True)
class _Recorded:
    """A recorded static step: ``replay`` reads ``inputs`` (tokens, own lengths, sharing) and fills
    ``logits`` and ``routing``."""

    inputs: tuple[torch.Tensor, ...]
    replay: Callable[[], None]
    logits: torch.Tensor
    routing: torch.Tensor | None


class TorchDecoder:
    """Decodes a batch with ``model``, a transformers ``PreTrainedModel`` that it changes in place.

    All calls but those of ``weights.check`` and ``weights.prepare`` come from one thread.
    ``static``: decode steps have few sizes and are recorded where the device can. ``packed``:
    weights are copied into oneDNN's layout (None: on a CPU that has it). ``context``: see
    :func:`~stages.engines.torch.model.attention_interface.fix_rope`. ``adapters``: computed beside the
    linear layers, and zero at first. ``routed_experts``: record in ``routing`` the experts of each
    token of the last forward, uint8 or int16 [T, layers * top-k]. ``sampled``: tokens from this
    number on, which pad the head, have no probability. Raises ``ValueError`` for a model that keeps
    its own attention, or cannot have the adapters.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        static: bool = False,
        packed: bool | None = None,
        adapters: AdapterOptions | None = None,
        context: int | None = None,
        routed_experts: bool = False,
        sampled: int | None = None,
    ) -> None:
        self.model = model.to(device).eval().requires_grad_(False)
        self.device = device
        self.dtype: torch.dtype = model.dtype
        self.vocabulary: int = model.get_input_embeddings().weight.shape[0]
        # Where rope changes its angles with a sequence's length, a row's cached keys would have the
        # others.
        self.max_context: int = min(
            getattr(model.config, "max_position_embeddings", 2**31), fix_rope(self.model, context)
        )
        self.rows: list[Row] = []
        self.prompts: list[Prompt] = []
        self.attention = TwoPartAttention()
        self.routing: torch.Tensor | None = None
        self._recorder: RoutingRecorder | None = None
        if routed_experts:
            from stages.engines.torch.model.expert_routing import RoutingRecorder

            self._recorder = RoutingRecorder(self.model)
        self._sharing: SharedPrompts | None = None
        self._static = static
        can_pack = device.type == "cpu" and can_pack_in(self.dtype)
        self.weights = DecoderWeights(self.model, can_pack if packed is None else packed, adapters)
        self._static_steps = _StaticSteps(self)
        self._sampled: int | None = None  # all, for the comparison with the plain forward
        with torch.inference_mode():
            probe = torch.arange(PROBE, device=device) * 7919 % self.vocabulary
            expected = model(input_ids=probe[None], use_cache=False).logits[0].float()
            self._take_over(probe, expected)
        self._sampled = sampled

    # -- the batch
    # ----------------------------------------------------------------------------------------------

    def prefill(
        self, prompts: Sequence[torch.Tensor], adapters: Sequence[str] = ()
    ) -> tuple[list[Prompt], torch.Tensor]:
        """Compute the keys and values of ``prompts`` (each int64 [P]) in one forward, each with its
        set of ``adapters``, by name.

        Returns their handles, each with the caller as its one holder, and the float32 [g, V] logits
        of the first response token.
        """
        names = adapters or [OWN] * len(prompts)
        lengths = torch.tensor([len(ids) for ids in prompts])
        ends = lengths.cumsum(0)
        longest = int(lengths.max())
        columns = torch.arange(longest)
        padded = (ends - lengths)[:, None] + torch.minimum(columns[None], lengths[:, None] - 1)
        packed = (columns[None] < lengths[:, None]).flatten().nonzero()[:, 0]
        positions = columns.expand(len(prompts), -1).flatten()[packed]
        self.attention.step = PrefillStep(
            self._put(padded), self._put(packed), first=len(self.prompts)
        )
        self._select(names, lengths.tolist())
        logits = self._forward(
            torch.cat([ids.cpu() for ids in prompts]), positions, self._put(ends - 1)
        )
        handles = [
            Prompt(len(self.prompts) + i, int(length), name)
            for i, (length, name) in enumerate(zip(lengths, names, strict=True))
        ]
        self.prompts += handles
        self._sharing = None
        return handles, logits

    def score(
        self, prompt_ids: torch.Tensor, response_ids: torch.Tensor, adapters: str = OWN
    ) -> torch.Tensor:
        """Return float32 [T, V] logits that predict each of ``response_ids`` [T] after
        ``prompt_ids``."""
        ids = torch.cat([prompt_ids, response_ids[:-1]]).cpu()
        positions = torch.arange(len(ids))
        self.attention.step = PrefillStep(
            self._put(positions[None]), self._put(positions), first=len(self.prompts)
        )
        self._select([adapters], [len(ids)])
        return self._forward(ids, positions, self._put(positions[len(prompt_ids) - 1 :]))

    def join(self, prompt: Prompt, copied: Pool | None = None, tokens: int = 0) -> None:
        """Append a row that continues ``prompt``; ``copied`` has keys and values of its first
        ``tokens``."""
        prompt.holders += 1
        self.rows.append(Row(prompt, tokens))
        self._sharing = None
        if copied is not None:
            self.attention.put_row(len(self.rows) - 1, copied, tokens)

    def extend(self, rows: Sequence[int], tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        """Feed the ``rows`` of these numbers their next ``tokens`` (each int64 [T]) in one forward.

        Returns float32 [n, V] logits of what follows.
        """
        counts = torch.tensor([len(ids) for ids in tokens])
        extensions = [
            Extension(number, row.prompt.slot, row.prompt.length, row.length, len(ids))
            for number, row, ids in zip(rows, [self.rows[n] for n in rows], tokens, strict=True)
        ]
        positions = [
            torch.arange(each.count) + each.prompt_length + each.begin for each in extensions
        ]
        self.attention.step = ExtendStep(extensions)
        self._select([self.rows[n].prompt.adapters for n in rows], counts.tolist())
        logits = self._forward(
            torch.cat(list(tokens)).cpu(), torch.cat(positions), self._put(counts.cumsum(0) - 1)
        )
        for each in extensions:
            self.rows[each.row].length += each.count
        return logits

    def leave(self, row: int) -> None:
        """Drop row number ``row``; the last row takes its number."""
        gone = self.rows[row]
        last = self.rows.pop()
        if gone is not last:
            self.rows[row] = last
            self.attention.move(self.attention.rows, len(self.rows), row, last.length)
        self._sharing = None
        self.release(gone.prompt)

    def release(self, prompt: Prompt) -> None:
        """Remove one holder of ``prompt``.

        Without holders its slot is freed, and the last prompt moves to it.
        """
        prompt.holders -= 1
        if prompt.holders:
            return
        last = self.prompts.pop()
        if prompt is not last:
            self.attention.move(self.attention.prompts, last.slot, prompt.slot, last.length)
            self.prompts[prompt.slot] = last
            last.slot = prompt.slot
        self._sharing = None

    def decode(self, tokens: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Feed each row its newest token (int64 [R], may be on the device).

        Returns float32 [R, V] logits of the next one, which the next call may overwrite.
        """
        count = len(self.rows)
        rows = count
        longest = max(row.length for row in self.rows) + 1
        names = [row.prompt.adapters for row in self.rows]
        # which tokens are of which set is in no recording
        static = not self._select(names) and self._static
        if static:
            rows = _size(rows, STATIC_ROWS)
            longest = _size(longest, STATIC_TOKENS)
        elif (
            self.dtype != torch.float32
        ):  # oneDNN compiles and keeps a kernel for each size that it meets
            longest = -(-longest // ROOM_TOKENS) * ROOM_TOKENS
        sharing = self._share(rows, static)
        lengths = self._put(torch.tensor([row.length for row in self.rows] + [0] * (rows - count)))
        newest = torch.zeros(rows, dtype=torch.int64, device=self.device)
        newest[:count] = self._put(torch.as_tensor(tokens))
        step = self._static_steps.decode if static else self.decode_step
        logits = step(newest, lengths, sharing, longest)[:count]
        self.routing = None if self.routing is None else self.routing[:count]
        for row in self.rows:
            row.length += 1
        return logits

    def decode_drafts(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Feed each row its newest token and those of its draft.

        Returns float32 [T, V] logits of what follows each of the packed tokens. The caller
        adds the tokens that it keeps to the ``length`` of each row.
        """
        counts = list(map(len, tokens))
        self._select([row.prompt.adapters for row in self.rows], counts)
        lengths = [row.length for row in self.rows]
        sharing = self._share(len(counts), self._static)
        self.attention.step = step = DecodeStep.of_several(sharing, lengths, counts, ROOM_TOKENS)
        fed = torch.tensor([token for of_row in tokens for token in of_row])
        return self._forward(fed, step.positions, None)

    def decode_step(
        self, tokens: torch.Tensor, own: torch.Tensor, sharing: SharedPrompts, longest: int
    ) -> torch.Tensor:
        """Enqueue a whole step of rows with ``own`` lengths, without a synchronisation. Returns
        float32 [R, V] logits."""
        self.attention.step = DecodeStep.of(sharing, own, longest)
        return self._forward(tokens, sharing.prompt_lengths + own, None)

    @contextmanager
    def alone(self, row: int) -> Iterator[None]:
        """Reduce the batch to row number ``row`` inside the context.

        No static step: its padding would overwrite other rows.
        """
        rows = self.rows
        static = self._static
        self.attention.exchange(row)
        self.rows = [rows[row]]
        self._sharing = None
        self._static = False
        try:
            yield
        finally:
            self.rows = rows
            self._sharing = None
            self._static = static
            self.attention.exchange(row)

    def check(self) -> None:
        """Compute two tokens beside the batch.

        Raises where the model or the device fails, whatever it is given.
        """
        (prompt,), first = self.prefill([torch.zeros(1, dtype=torch.int64)])
        self.join(prompt)
        last = len(self.rows) - 1
        with self.alone(last):
            second = self.decode([0])
        self.leave(last)
        self.release(prompt)
        if not bool(torch.cat([first, second]).logsumexp(-1).isfinite().all()):
            raise ValueError(NOT_FINITE)

    def put_adapters(self, name: str, adapters: AdapterSet, prepared: WeightSet) -> None:
        """Use ``prepared`` as the weights of ``adapters``, which are the set ``name``."""
        self.weights.install(prepared)
        if self.weights.adapters.of(name) is not adapters:
            self.weights.adapters.put(name, adapters)

    def remove_adapters(self, name: str) -> None:
        """Forget the set ``name``, which no row has."""
        self.weights.adapters.remove(name)
        self._static_steps.clear()

    def clear(self) -> None:
        """Remove every row and prompt and free their keys and values."""
        self.rows = []
        self.prompts = []
        self._sharing = None
        self._static_steps.clear()
        self.attention.clear()

    @property
    def fused(self) -> bool:
        """Return whether q, k and v are one tensor, and gate and up another."""
        return self._llama is not None

    # -- inside
    # ----------------------------------------------------------------------------------------------

    def _select(self, names: Sequence[str], counts: Sequence[int] | None = None) -> bool:
        return self.weights.adapters.select(names, counts, self.device)

    def _share(self, rows: int, static: bool) -> SharedPrompts:
        if self._sharing is None or len(self._sharing.place) != rows:
            self._sharing = _shared(self.rows, self.prompts, rows, static, self.device)
        return self._sharing

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        return devices.put(tensor, self.device)

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        """Return float32 [K, V] logits of the tokens ``keep`` of ``ids`` [T] (None: of all)."""
        if self._llama is not None:
            attend = self.attention.attend
            return self._masked(
                self._llama(self._put(ids), self._put(positions), keep, attend).float()
            )
        out = self.model(
            input_ids=self._put(ids)[None],
            position_ids=self._put(positions)[None],
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,
        )
        self.routing = None if self._recorder is None else self._recorder.last()
        return self._masked(out.logits[0].float())

    def _masked(self, logits: torch.Tensor) -> torch.Tensor:
        """Return ``logits`` [K, V], overwritten: no token that pads the head is sampled."""
        if self._sampled is not None:
            logits[:, self._sampled :] = -torch.inf
        return logits

    def _take_over(self, probe: torch.Tensor, expected: torch.Tensor) -> None:
        """Replace the model's attention, then use the fastest forward that agrees with
        ``expected``."""
        replace_attention(self.model, ATTENTION, _two_part_attention, self.attention)
        head = self.model.get_output_embeddings()
        if type(head) is nn.Linear and self.dtype != torch.float32:
            use_float32(head)

        def check(tokens: int = PROBE) -> None:
            wanted = torch.cat(
                [
                    expected[PREFILLED - 1 : PREFILLED],
                    expected[EXTENDED - 1 : tokens].repeat_interleave(2, 0),
                ]
            )
            check_logits(
                self.model,
                "two-part attention",
                lambda: self._probed(probe[:tokens]),
                wanted,
                self.dtype,
            )

        self._llama: LlamaForward | None = None
        quick = is_llama(self.model)
        # The model's own modules show how each layer's scores are computed; to decode with them too
        # takes six times as long.
        check(PREFILLED if quick else PROBE)
        if quick:
            self._llama = LlamaForward(self.model, self.weights.packed)
            try:
                check()
            except ValueError:
                for linear in self._llama.linears() if self.weights.packed else ():
                    linear.unpack()
                self._llama = None
                if not self.weights.packed:
                    with torch.inference_mode(False):
                        separate(self.model.parameters())  # it has joined them
        self.weights.lay_out(self._llama)
        if self._llama is None and (quick or self.weights.packed):
            check()

    def _probed(self, probe: torch.Tensor) -> torch.Tensor:
        """Prefill part of ``probe`` [T], extend two rows with some of the rest, and decode the
        others.

        Returns the logits after each of these: [1, V], or [1 + 2 (T - EXTENDED + 1), V] where there
        is a rest.
        """
        try:
            (prompt,), first = self.prefill([probe[:PREFILLED]])
            if len(probe) == PREFILLED:
                return first
            self.join(prompt)
            self.join(prompt)
            second = self.extend([0, 1], [probe[PREFILLED:EXTENDED]] * 2)
            decoded = [self.decode([int(token)] * 2).clone() for token in probe[EXTENDED:]]
            return torch.cat([first, second, *decoded])
        finally:
            self.clear()


class _StaticSteps:
    """The static steps of ``decoder``, each recorded when it is first computed."""

    def __init__(self, decoder: TorchDecoder) -> None:
        self._decoder = decoder
        self._recorded: dict[tuple[object, ...], _Recorded] = {}
        self._grown = 0  # value of attention.grown for which the recordings hold

    def clear(self) -> None:
        self._recorded = {}

    def decode(
        self, tokens: torch.Tensor, own: torch.Tensor, sharing: SharedPrompts, longest: int
    ) -> torch.Tensor:
        """Compute what :meth:`TorchDecoder.decode_step` does. The next call may overwrite it."""
        decoder = self._decoder
        inputs = (tokens, own, sharing.members, sharing.place, sharing.prompt_lengths)
        adapters = decoder.rows[0].prompt.adapters
        size = (adapters, *tokens.shape, *sharing.members.shape, sharing.longest, longest)
        self._drop_void()
        recorded = self._recorded.get(size)
        if recorded is None:
            fixed = tuple(tensor.clone() for tensor in inputs)
            tokens, own, members, place, lengths = fixed
            sharing = SharedPrompts(members, place, lengths, sharing.longest, straight=False)
            # makes room and chooses kernels, which no recording may
            decoder.decode_step(tokens, own, sharing, longest)
            routing = None if decoder.routing is None else decoder.routing.clone()

            def act() -> torch.Tensor:
                logits = decoder.decode_step(tokens, own, sharing, longest)
                if routing is not None and decoder.routing is not None:
                    routing.copy_(decoder.routing)
                return logits

            replay, logits = devices.record(decoder.device, act)
            self._drop_void()  # grown for this size: older recordings read the old pools
            recorded = self._recorded[size] = _Recorded(fixed, replay, logits, routing)
        for fixed_tensor, tensor in zip(recorded.inputs, inputs, strict=True):
            fixed_tensor.copy_(tensor)
        recorded.replay()
        decoder.routing = None if recorded.routing is None else recorded.routing.clone()
        return recorded.logits

    def _drop_void(self) -> None:
        if self._grown != self._decoder.attention.grown:
            self._recorded = {}
            self._grown = self._decoder.attention.grown


def _shared(
    rows: Sequence[Row],
    prompts: Sequence[Prompt],
    count: int,
    static: bool,
    device: torch.device,
) -> SharedPrompts:
    """Return index tensors for ``rows``, and for rows that pad a static step to ``count``."""
    members: list[list[int]] = [[] for _ in prompts]
    for number, row in enumerate(rows):
        members[row.prompt.slot].append(number)
    slots = len(members)
    most = max(len(numbers) for numbers in members)
    longest = max(prompt.length for prompt in prompts)
    if static:
        slots = _size(slots, 1)
        most = _size(most, 1)
        longest = _size(longest, STATIC_TOKENS)
    padded = torch.zeros(slots, most, dtype=torch.int64)
    place = torch.zeros(count, dtype=torch.int64)
    lengths = torch.zeros(count, dtype=torch.int64)
    for slot, numbers in enumerate(members):
        padded[slot, : len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        place[numbers] = torch.arange(len(numbers)) + slot * most
        lengths[numbers] = prompts[slot].length
    straight = padded.numel() == count and torch.equal(padded.flatten(), torch.arange(count))
    padded, place, lengths = (devices.put(each, device) for each in (padded, place, lengths))
    return SharedPrompts(padded, place, lengths, longest, straight)


def _size(need: int, least: int) -> int:
    """Return the size of a static step for ``need``: ``least`` times the smallest sufficient power
    of two."""
    while least < need:
        least *= 2
    return least


def _two_part_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Serve as the attention function that transformers calls in the forward of a
    :class:`TorchDecoder`."""
    attention: TwoPartAttention = state_of(module)
    layer: int = module.layer_idx  # type: ignore[assignment]
    attention.layers[layer] = Scores.of(query, options), options.get("s_aux")
    # [T, heads, D]
    packed_query, packed_key, packed_value = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attention.attend(layer, packed_query, packed_key, packed_value)
    return out.view(1, len(out), query.shape[1], -1), None
