"""A taskset of verifiers whose user says something, too."""

import verifiers.v1 as vf


class TwiceTask(vf.Task):
    @vf.reward
    async def changed(self, trace: vf.Trace) -> float:
        first, last = (message.content for message in trace.assistant_messages)
        return float(first != last)


class TwiceTaskset(vf.Taskset[TwiceTask, vf.TasksetConfig]):
    def load(self):
        return [TwiceTask(vf.TaskData(prompt="Yes or no?"))]


class TwiceEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn("Really?")


__all__ = ["TwiceEnv", "TwiceTaskset"]
