"""Environments of ``skyrl_gym``: ``environment.use = "skyrl_gym:gsm8k_multi_turn"``."""

from __future__ import annotations

from typing import Any

from pipeline.compat.extras import extra


class SkyRLGym:
    """The environment that the library registers as ``name``, with the arguments of
    ``skyrl_gym.make``. Its ``extras`` are the row's columns; the prompt is the row's."""

    gives_reward = True
    replayable = True  # as its answers depend on its row and the turns

    def __init__(self, name: str, **env_config: Any) -> None:
        with extra("environments"):
            import skyrl_gym
        if name not in skyrl_gym.envs.registration.registry:
            names = sorted(skyrl_gym.envs.registration.registry)
            raise LookupError(f"skyrl_gym has no environment {name!r}; it has {names}")
        self._make = skyrl_gym.make
        self._name = name
        self._config = env_config

    def reset(self, prompt: Any, **columns: Any) -> None:
        """Begin, of a row with the columns that the environment asks for, as ``reward_spec``."""
        self._environment = self._make(self._name, env_config=self._config, extras=columns)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        self._environment.init(messages)

    def step(self, text: str) -> dict[str, Any]:
        """Return ``observations``, ``reward`` and ``done``."""
        output = self._environment.step(text)
        return {name: output[name] for name in ("observations", "reward", "done")}

    def close(self) -> None:
        """Let the environment go."""
        self._environment.close()
