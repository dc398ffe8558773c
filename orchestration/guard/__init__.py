"""The guard: compares what a run measures with what is usual in it, and raises alarms
(docs/runs.md)."""
