"""Games of ``textarena`` for one player: ``environment.use = "textarena:GuessTheNumber-v0"``."""

from __future__ import annotations

import difflib

from pipeline.compat.extras import extra

RAW = "-raw"  # ends the name of a game whose observations have only what is new
PLAYER = 0


class TextArena:
    """The game that the library registers as ``name``. What it says first follows the prompt."""

    gives_reward = True
    replayable = True  # a seed and the same turns give the same game

    def __init__(self, name: str) -> None:
        with extra("environments"):
            import textarena
        names = textarena.envs.registration.ENV_REGISTRY
        self._name = name.removesuffix(RAW) + RAW
        if self._name not in names:
            games = sorted(each.removesuffix(RAW) for each in names if each.endswith(RAW))
            near = difflib.get_close_matches(name, games, cutoff=0.3) or games[:3]
            raise LookupError(f"textarena has no game {name!r}; of its {len(games)}: {near}")
        self._make = textarena.make

    def reset(self, seed: int) -> str:
        """Begin the game, and return its rules."""
        self._game = self._make(self._name)
        self._game.reset(num_players=1, seed=seed % 2**32)
        return self._observed()

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Make a move. Returns what the game says, the reward at the end, and whether that is."""
        done, _ = self._game.step(action=text)
        if not done:
            return self._observed(), 0.0, False
        rewards, _ = self._game.close()
        return None, float(rewards[PLAYER]), True

    def _observed(self) -> str:
        """Return what is new, without the player's own moves."""
        _, observations = self._game.get_observation()
        return "\n".join(text for sender, text, *_ in observations if sender != PLAYER)
