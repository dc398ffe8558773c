"""The calls that TransferQueue's users know, on a dock: values by key, in partitions.

`docs/sample-flow.md` says what is the same and what is stricter. A process connects once,
by :func:`init`; the calls and their async twins can then be used from any thread and any loop.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase

from pipeline.compat.transfer_queue.batch_meta import KVBatchMeta, Tag
from pipeline.compat.transfer_queue.discovery import INDEX, RUN, announce, find_queue
from pipeline.compat.transfer_queue.fields import MAX_FIELDS, as_list, as_tensor
from pipeline.compat.transfer_queue.queue import DEFAULTS, Queue

__all__ = [
    "INDEX",
    "MAX_FIELDS",
    "RUN",
    "KVBatchMeta",
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "close",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
]

Parser = Callable[[dict[str, Any]], Any]
P = ParamSpec("P")
T = TypeVar("T")

_TRANSFER_QUEUES_OWN = ("controller", "backend", "metrics")
_queue: Queue | None = None  # TransferQueue's calls name no connection, so a process has one


def init(conf: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Connect this process, once; later calls change nothing. Returns the configuration in use.

    ``conf`` may give ``url`` (of an index: ``redis://``, ``rediss://``, ``unix://``), ``run``,
    ``arena`` (bytes of this node's warehouse), ``directory``, ``node``, ``serve`` (the address on
    which other nodes reach it), ``secret``, the PEM files ``tls_certificate``, ``tls_key`` and
    ``tls_authority``, ``timeout`` and ``room_timeout`` (seconds).

    Without a URL it is the queue of the Ray cluster that this process is in, or the index that a
    parent process has started, or else a new one, which ends with this process; a worker of Ray
    never opens one. TransferQueue's own sections are accepted and have no effect."""
    global _queue
    settings = {
        name: value for name, value in (conf or {}).items() if name not in _TRANSFER_QUEUES_OWN
    }
    if unknown := set(settings) - set(DEFAULTS):
        raise ValueError(f"conf: {sorted(unknown)} is not known; it takes {sorted(DEFAULTS)}")
    chosen = settings.get("url") is not None
    opens = _queue is None or _queue.pid != os.getpid()
    if opens:
        cluster_queue = {} if chosen else find_queue()
        _queue = Queue(
            DEFAULTS
            | cluster_queue
            | {name: value for name, value in settings.items() if value is not None}
        )
    assert _queue is not None
    try:
        _queue.announced = _queue.announced or announce(_queue.conf, chosen=chosen)
    except RuntimeError:
        if opens:
            close()
        raise
    return dict(_queue.conf)


def close() -> None:
    """Disconnect. An index that this process has started ends, with all that is in it."""
    global _queue
    if _queue is not None:
        _queue.close()
    _queue = None


def _connected() -> Queue:
    """Return this process's connection, opened when its parent or its Ray cluster has a queue."""
    if _queue is None or _queue.pid != os.getpid():
        if not find_queue():
            raise RuntimeError(
                "no queue to connect to: call init() first, in this process or in its parent"
            )
        init()
    assert _queue is not None
    return _queue


def _twins(
    work: Callable[P, Coroutine[Any, Any, T]],
) -> tuple[Callable[P, T], Callable[P, Awaitable[T]]]:
    """Return the call ``work`` for synchronous and for asynchronous callers; both run it in the
    connection's loop."""

    @functools.wraps(work)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return _connected().call(work(*args, **kwargs))

    @functools.wraps(work)
    async def submit(*args: P.args, **kwargs: P.kwargs) -> T:
        return await _connected().submit(work(*args, **kwargs))

    call.__name__ = call.__qualname__ = work.__name__.removeprefix("_")
    submit.__name__ = submit.__qualname__ = f"async{work.__name__}"
    return call, submit


async def _kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tag: Tag | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Put the fields and the tag of one key.

    A dict gives the row itself: a tensor or a numpy array of any shape, or a JSON value.
    """
    if fields is None and tag is None:
        raise ValueError("Please provide at least one parameter of fields or tag.")
    if isinstance(fields, dict):
        rows: dict[str, Any] = {}
        for name, value in fields.items():
            row = as_tensor(name, value) if isinstance(value, np.ndarray | np.generic) else value
            if isinstance(row, torch.Tensor) and row.is_nested:
                raise ValueError("Please use (async)kv_batch_put for batch operation")
            rows[name] = row.unsqueeze(0) if isinstance(row, torch.Tensor) else NonTensorStack(row)
        fields = TensorDict(rows, batch_size=[1])
    elif fields is not None and not isinstance(fields, TensorDict):
        raise ValueError("`fields` can only be dict or TensorDict")
    return await _kv_batch_put(
        [key], partition_id, fields, None if tag is None else [tag], data_parser
    )


async def _kv_batch_put(
    keys: list[str] | str,
    partition_id: str,
    fields: TensorDict | None = None,
    tags: list[Tag] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Put fields (a TensorDict of one row for each key) and tags (one for each key) of several
    keys, in one atomic step. New fields join those that the keys have, or replace them; so do tags.
    """
    keys = _checked_keys(keys)
    if fields is None and tags is None:
        raise ValueError("Please provide at least one parameter of `fields` or `tags`.")
    if fields is not None and not isinstance(fields, TensorDictBase):
        raise TypeError(
            f"fields: takes a TensorDict, got {type(fields).__name__}; give TensorDict(fields, "
            f"batch_size=[{len(keys)}])"
        )
    if fields is not None and (not fields.batch_size or fields.batch_size[0] != len(keys)):
        raise ValueError(
            f"`keys` with length {len(keys)} does not match the `fields` TensorDict with "
            f"batch_size {fields.batch_size}"
        )
    if tags is not None and len(tags) != len(keys):
        raise ValueError(f"keys with length {len(keys)} does not match length of tags {len(tags)}")
    partition = _checked_partition(partition_id)
    return await _connected().put(
        keys, partition, {} if fields is None else _parsed(fields, data_parser), tags
    )


def _parsed(fields: TensorDictBase, parser: Parser | None) -> dict[str, Any]:
    """Return the fields by name, as ``parser`` returns them."""
    out: dict[str, Any] = {str(name): fields.get(name) for name in fields.keys()}  # noqa: SIM118
    if parser is None:
        return out
    for name, value in out.items():
        if not isinstance(value, torch.Tensor):
            out[name] = as_list(name, value)
        elif value.is_nested:
            out[name] = list(value.unbind())
    sizes = {name: len(value) for name, value in out.items()}
    parsed = parser(out)
    if (
        not isinstance(parsed, dict)
        or {name: len(value) for name, value in parsed.items()} != sizes
    ):
        raise ValueError(
            "data_parser: it must return the dict that it was given, with all fields and their "
            "numbers of rows"
        )
    return parsed


async def _kv_batch_get(
    keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None
) -> TensorDict:
    """Return the rows of ``keys``, in this order: the fields that all of them have, or
    ``select_fields``.

    Raises ValueError for a key or a field that is not there.
    """
    select = [select_fields] if isinstance(select_fields, str) else select_fields
    return await _connected().get(_checked_keys(keys), _checked_partition(partition_id), select)


async def _kv_batch_get_by_meta(
    meta: KVBatchMeta, select_fields: list[str] | str | None = None
) -> TensorDict:
    """Return the rows of the keys in ``meta``, with its fields or ``select_fields`` of them."""
    if meta.partition_id is None:
        raise ValueError("Must provide partition_id in the input KVBatchMeta.")
    select = [select_fields] if isinstance(select_fields, str) else select_fields
    if select is not None and not set(select) <= set(meta.fields or ()):
        missing = [name for name in select if name not in (meta.fields or ())]
        raise ValueError(
            f"select_fields: {missing} not found among the fields of the metadata, {meta.fields}"
        )
    return await _kv_batch_get(
        meta.keys, meta.partition_id, meta.fields if select is None else select
    )


async def _kv_list(partition_id: str | None = None) -> dict[str, dict[str, Tag]]:
    """Partition → key → tag, of one partition or of all; keys in the order in which they were first
    put."""
    return await _connected().partitions(
        None if partition_id is None else _checked_partition(partition_id)
    )


async def _kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """Remove keys with their fields and tags; their bytes are free at once.

    Keys that do not exist are passed over.
    """
    await _connected().clear(_checked_keys(keys), _checked_partition(partition_id))


kv_put, async_kv_put = _twins(_kv_put)
kv_batch_put, async_kv_batch_put = _twins(_kv_batch_put)
kv_batch_get, async_kv_batch_get = _twins(_kv_batch_get)
kv_batch_get_by_meta, async_kv_batch_get_by_meta = _twins(_kv_batch_get_by_meta)
kv_list, async_kv_list = _twins(_kv_list)
kv_clear, async_kv_clear = _twins(_kv_clear)


def _checked_keys(keys: list[str] | str) -> list[str]:
    if isinstance(keys, str):
        return [keys]
    if not isinstance(keys, list):
        raise TypeError("Only string or list of strings are allowed as `keys`.")
    if not keys:
        raise ValueError("Received an empty list as keys.")
    if not all(isinstance(key, str) for key in keys):
        raise TypeError("Not all elements in `keys` are strings.")
    return keys


def _checked_partition(partition_id: str) -> str:
    if not isinstance(partition_id, str):
        raise TypeError(f"partition_id: takes a string, got {partition_id!r:.80}")
    return partition_id
