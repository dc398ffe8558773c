"""Documents, logs and topics of a run in the index.

Each has one name, one place in the code and one type.

    Document.put ──▶ key `doc:NAME`, a text ─────────▶ Document.get        its topic wakes Document.wait
    Log.append   ──▶ key `NAME`, entries 0, 1, 2, … ─▶ Log.read, Log.next, then Log.trim
    index.wake   ──▶ key `wake:NAME` ────────────────▶ index.wait, index.woken

They are declared in three files, each by the package that owns it: ``pipeline/documents/flow.py``,
``stages/weights/documents.py`` and ``orchestration/state/documents.py``. Below each declaration
stands what it says, and a line `removed:` if something removes it. Other documents stay until the
run is deleted: a rewind and the end of the run keep them. A log ends with the sample flow, by a
rewind or the end of the run. The table of all, with the modules that write and read them, is
``docs/run-documents.md``; no other code may have a key (``tests/test_documents.py``).

This module imports no client of the index: a program that only asks a service may read
declarations without one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from operator import methodcaller
from typing import Any, Generic, Protocol, TypeVar

import msgpack

T = TypeVar("T")


class Topic(str):
    """A name that processes wait on until another one wakes it. Waking carries no value."""

    __slots__ = ()


class DocumentDamaged(ValueError):
    """The text of a document is not one that its writer writes."""


class DocumentIndex(Protocol):
    """The part of the index that a document needs."""

    @property
    def run(self) -> str: ...

    async def write_document(self, name: str, text: str, *, once: bool = False) -> None: ...

    async def read_document(self, name: str) -> str | None: ...

    async def remove_document(self, name: str) -> None: ...

    async def wake(self, topic: Topic) -> None: ...

    async def woken(self, topic: Topic, after: str, timeout: float) -> str: ...


class LogIndex(Protocol):
    """The part of the index that a log needs."""

    async def append_log(self, log: str, number: int, entry: bytes) -> None: ...

    async def log_end(self, log: str) -> int: ...

    async def read_log(self, log: str, number: int, timeout: float) -> bytes | None: ...

    async def next_entry(self, log: str, number: int) -> bytes: ...

    async def trim_log(self, log: str, number: int) -> None: ...

    async def sign_entry(self, log: str, number: int, owner: str) -> int: ...


class Document(Generic[T]):
    """A text under a name, which is a value of type T for all that write and read it.

    ``key``: the name; its fields in braces are given by keyword with each call. ``decode`` and
    ``encode``: from and to text. ``topic`` is woken by each :meth:`put`."""

    def __init__(
        self,
        key: str,
        decode: Callable[[str], T],
        encode: Callable[[T], str] = str,
        topic: Topic | None = None,
    ) -> None:
        self.key = key
        self._decode = decode
        self._encode = encode
        self._topic = topic

    @classmethod
    def of_class(cls, key: str, place: str, topic: Topic | None = None) -> Document[Any]:
        """Return a document whose values are of the class at ``place`` (MODULE:NAME), with its
        methods ``to_json`` and ``from_json``. The module is imported when the first value is
        read."""
        module, _, name = place.partition(":")

        def decode(text: str) -> Any:
            return getattr(import_module(module), name).from_json(text)

        return cls(key, decode, methodcaller("to_json"), topic)

    @classmethod
    def of_json(cls, key: str, topic: Topic | None = None) -> Document[Any]:
        """Return a document whose values are written as JSON: numbers, texts, lists and dicts of
        them."""
        return cls(key, json.loads, json.dumps, topic)

    def name(self, **fields: str | int) -> str:
        """Return the name with the values of its fields.

        >>> Document("leave:{name}", bool).name(name="rollout-0-17-a1b2c3")
        'leave:rollout-0-17-a1b2c3'
        """
        return self.key.format(**fields)

    def entry(self, value: T, **fields: str | int) -> tuple[str, str]:
        """Name and text, for :meth:`Events.emit`, which writes documents with an event."""
        return self.name(**fields), self._encode(value)

    async def put(self, index: DocumentIndex, value: T, **fields: str | int) -> None:
        """Write ``value``, and wake the topic."""
        await index.write_document(*self.entry(value, **fields))
        if self._topic is not None:
            await index.wake(self._topic)

    async def put_once(self, index: DocumentIndex, value: T, **fields: str | int) -> T:
        """Write ``value`` unless there is one. Returns the value that there is then. Wakes
        nobody."""
        await index.write_document(*self.entry(value, **fields), once=True)
        current = await self.get(index, **fields)
        return value if current is None else current

    async def get(self, index: DocumentIndex, **fields: str | int) -> T | None:
        """Return the value; None where there is none, or an empty text. Raises DocumentDamaged."""
        name = self.name(**fields)
        text = await index.read_document(name)
        if not text:
            return None
        try:
            return self._decode(text)
        except (ValueError, TypeError, LookupError) as cause:
            raise DocumentDamaged(
                f"document {name!r} of run {index.run!r} cannot be read ({cause}); it was written "
                f"by "
                "another version of AsyncDock, or by hand: resume the run with the version that "
                "began it"
            ) from cause

    async def wait(self, index: DocumentIndex, renew: float, **fields: str | int) -> T:
        """Wait until there is a value, and return it.

        ``renew``: seconds after which the wait on the server is renewed.
        """
        assert self._topic is not None, f"{self.key} wakes nobody"
        position = ""
        while (value := await self.get(index, **fields)) is None:
            position = await index.woken(self._topic, position, renew)
        return value

    async def remove(self, index: DocumentIndex, **fields: str | int) -> None:
        """Remove it. Wakes nobody."""
        await index.remove_document(self.name(**fields))


def _plain(value: Any) -> Any:
    return value


class Log(Generic[T]):
    """Entries 0, 1, 2, … of type T, which are written as msgpack and read by number.

    ``key``: the name; where it has fields in braces, :meth:`at` gives the log of their values.
    """

    def __init__(
        self,
        key: str,
        decode: Callable[[Any], T] = _plain,
        encode: Callable[[T], Any] = _plain,
    ) -> None:
        self.key = self.name = key
        self._decode = decode
        self._encode = encode

    def at(self, **fields: str | int) -> Log[T]:
        """Return the log with these values of its fields.

        >>> Log("ranks:{life}:{rank}").at(life="update-0-17-a1b2c3", rank=1).name
        'ranks:update-0-17-a1b2c3:1'
        """
        log = Log(self.key, self._decode, self._encode)
        log.name = self.key.format(**fields)
        return log

    async def append(self, index: LogIndex, number: int, entry: T) -> None:
        """Write entry ``number``. Raises IndexRefused when it was written before."""
        await index.append_log(self.name, number, msgpack.packb(self._encode(entry)))

    async def end(self, index: LogIndex) -> int:
        """Return the number of the entry that comes next."""
        return await index.log_end(self.name)

    async def read(self, index: LogIndex, number: int, timeout: float) -> T | None:
        """Return entry ``number``; None when it has not come after ``timeout`` seconds.

        Raises IndexRefused when it was removed.
        """
        packed = await index.read_log(self.name, number, timeout)
        return None if packed is None else self._decode(msgpack.unpackb(packed))

    async def next(self, index: LogIndex, number: int) -> T:
        """Return entry ``number``, waiting for it as long as it takes. Raises IndexRefused when it
        was removed."""
        return self._decode(msgpack.unpackb(await index.next_entry(self.name, number)))

    async def sign(self, index: LogIndex, number: int, owner: str) -> int:
        """Record that ``owner`` is done with entry ``number``. Returns how many owners are."""
        return await index.sign_entry(self.name, number, owner)

    async def trim(self, index: LogIndex, number: int) -> None:
        """Remove entry ``number`` and its signatures."""
        await index.trim_log(self.name, number)
