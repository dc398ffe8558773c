"""A taskset of verifiers that two agents play."""

import verifiers.v1 as vf


class PairTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        return [vf.Task(vf.TaskData(prompt="Play."))]


class PairConfig(vf.EnvConfig):
    white: vf.AgentConfig = vf.AgentConfig()
    black: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[PairConfig]):
    async def run(self, task, agents):
        await agents.white.run(task)
        await agents.black.run(task)


__all__ = ["PairEnv", "PairTaskset"]
