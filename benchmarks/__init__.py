"""What the figures of docs/ were measured with: ``python -m benchmarks.ROOM.NAME``, in the root of a
clone."""
