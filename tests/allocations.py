"""Allocations and frees of torch's CPU allocator, in order."""

from __future__ import annotations

import gc

from torch.profiler import ProfilerActivity, profile


class Allocations:
    """Records from now until :meth:`stop`."""

    def __init__(self) -> None:
        # What an earlier recording saw allocated counts when it is freed: garbage of it does not
        # wait until this one.
        gc.collect()
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()

    def stop(self) -> None:
        self._profile.stop()

    def sizes(self) -> list[int]:
        """Bytes, negative where they were freed.

        A mapped file counts with its whole size. What was allocated before any recording is not
        counted when it is freed.
        """
        recorded: list = self._profile.profiler.kineto_results.events()  # type: ignore[type-arg, union-attr]
        events = sorted(recorded, key=lambda event: event.start_ns())
        return [event.nbytes() for event in events if event.name() == "[memory]"]
