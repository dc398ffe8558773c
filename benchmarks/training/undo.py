"""What it costs that a train batch of several optimizer steps is atomic: the copy of weights and
moments that is kept before it, and putting it back.

    batch    seconds of a batch with the copy over one without, in turns, by one engine
    copy     seconds of keeping and of putting back, and the bytes of host memory

    python -m benchmarks.training.undo [--model smollm2] [--epochs 2] [--repeats 3] [--threads 1] [--device auto]
"""

from __future__ import annotations

import argparse
import statistics

import torch

from benchmarks.training.lora import in_turns, rows_of_a_step, seconds
from stages import device as devices
from stages.algorithms.policy_gradient.grpo import GRPO
from stages.engines.torch.train import TorchTrainEngine
from stages.model.load import load_model


def measure(
    source: str, epochs: int, repeats: int, threads: int, device: torch.device
) -> dict[str, float]:
    model, _ = load_model(source, dtype=torch.float32, seed=0)
    options = {"learning_rate": 1e-5, "total_steps": 1000, "token_budget": 2048}
    engine = TorchTrainEngine(model, **options, threads=threads, device=device)  # type: ignore[arg-type]
    batch = rows_of_a_step(model.config.get_text_config().vocab_size)
    undo = engine._undo
    algorithm = GRPO(epochs=epochs)
    keep = undo.keep

    def train(copies: bool) -> None:
        undo.keep = keep if copies else lambda tensors: None  # type: ignore[method-assign]
        engine.train_batch(batch, algorithm)
        devices.synchronize(device)

    found = in_turns(lambda: train(True), lambda: train(False), repeats)
    state = [tensor for p in engine.trained.values() for tensor in engine.changed_by_step(p)]

    def kept() -> None:
        keep(state)
        devices.synchronize(device)

    def put_back() -> None:
        undo.put_back()
        devices.synchronize(device)

    copies = [(seconds(kept)[0], seconds(put_back)[0]) for _ in range(repeats)]
    found["keep"], found["put_back"] = (
        statistics.median(times) for times in zip(*copies, strict=True)
    )
    return {**found, "bytes": undo._memory.numel()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default=devices.AUTO)
    options = parser.parse_args()
    device = devices.select(options.device)
    found = measure(options.model, options.epochs, options.repeats, options.threads, device)
    print(f"{options.model}, {options.epochs} epochs, {device}")
    print(
        f"batch with the copy {found['one']:.2f} s, without {found['other']:.2f} s: "
        f"{found['ratio']:.3f} times as long"
    )
    print(f"processor seconds: {found['cpu_ratio']:.3f} times as many")
    print(
        f"keep {found['keep']:.3f} s, put back {found['put_back']:.3f} s, "
        f"{found['bytes'] / 2**20:.0f} MiB"
    )


if __name__ == "__main__":
    main()
