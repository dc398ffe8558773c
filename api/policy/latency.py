"""How long requests to policies take, under vLLM's names, for Prometheus."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest

MOST_MODELS = 100  # with series of their own
OTHERS = "others"
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1, 2.5)
WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)


class Latencies:
    """Histograms in seconds, by model."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._models = set[str]()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            labels = ("model_name",)
            name = f"vllm:{name}_seconds"
            return Histogram(name, text, labels, buckets=buckets, registry=self._registry)

        self._first = histogram(
            "time_to_first_token", "From a request to the first token of a choice.", FIRST
        )
        self._between = histogram(
            "inter_token_latency", "Between two tokens of a choice, as they arrive.", BETWEEN
        )
        self._per_token = histogram(
            "request_time_per_output_token", "Of one choice: mean between two tokens.", BETWEEN
        )
        self._whole = histogram(
            "e2e_request_latency", "From a request to the end of its answer.", WHOLE
        )

    @contextlib.contextmanager
    def request(self, model: str) -> Iterator[Callable[[int], None]]:
        """Measure one request, unless it fails. Yields what is called for each token of a choice
        with the choice's number."""
        if model in self._models or len(self._models) < MOST_MODELS:
            self._models.add(model)
        else:
            model = OTHERS
        began = time.perf_counter()
        tokens = dict[int, list[float]]()

        def arrived(choice: int) -> None:
            tokens.setdefault(choice, []).append(time.perf_counter())

        yield arrived
        self._whole.labels(model).observe(time.perf_counter() - began)
        for times in tokens.values():
            self._first.labels(model).observe(times[0] - began)
            for before, after in itertools.pairwise(times):
                self._between.labels(model).observe(after - before)
            if len(times) > 1:
                mean = (times[-1] - times[0]) / (len(times) - 1)
                self._per_token.labels(model).observe(mean)

    def text(self) -> bytes:
        return generate_latest(self._registry)
