"""What the figures of docs/ were measured with: ``python -m benchmarks.NAME``, in the root of a clone."""
