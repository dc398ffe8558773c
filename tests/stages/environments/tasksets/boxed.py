"""A taskset of verifiers whose tasks need a container."""

import verifiers.v1 as vf


class BoxedTask(vf.Task):
    NEEDS_CONTAINER = True


class BoxedTaskset(vf.Taskset[BoxedTask, vf.TasksetConfig]):
    def load(self):
        return [BoxedTask(vf.TaskData(prompt="Build it."))]


__all__ = ["BoxedTaskset"]
