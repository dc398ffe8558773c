"""A training loop as users write it, with Tinker's SDK: it knows of no AsyncDock, and of no server
that is killed. A line a step: the loss, and what is sampled after it."""

from __future__ import annotations

import sys

import tinker
from tinker import types

TOKENS = [5, 9, 14, 7, 21, 30, 12]


def main(steps: int) -> None:
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens=TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * 6},
    )
    service = tinker.ServiceClient()
    created = service.create_lora_training_client(base_model="tiny", rank=4, seed=1)
    trainer = created.result()
    for step in range(steps):
        passed = trainer.forward_backward([datum], "cross_entropy")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=0.01))
        loss = passed.result().metrics["loss:sum"]
        stepped.result()
        sampler = trainer.save_weights_and_get_sampling_client()
        answer = sampler.sample(
            prompt=types.ModelInput.from_ints(tokens=TOKENS[:2]),
            num_samples=2,
            sampling_params=types.SamplingParams(max_tokens=8, seed=step),
        ).result()
        print(step, loss, [sequence.tokens for sequence in answer.sequences], flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
