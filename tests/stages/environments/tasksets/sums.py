"""A taskset of verifiers with a tool, as its users write them."""

import verifiers.v1 as vf


class SumsToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [SumsToolset(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") < 40)


class SumsTaskset(vf.Taskset[SumsTask, vf.TasksetConfig]):
    def load(self):
        for a, b in ((3, 4), (4711, 1234)):
            data = SumsData(prompt=f"{a} + {b}?", system_prompt="Add.", answer=str(a + b))
            yield SumsTask(data, self.config.task)


__all__ = ["SumsTaskset"]

if __name__ == "__main__":
    SumsToolset.run()
