"""The output layers of a model: logits, their logprobs, and the values of a critic."""
