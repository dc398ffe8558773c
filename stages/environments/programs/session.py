"""What a program knows of its trajectory."""

from __future__ import annotations

MODEL = "policy"


class Session:
    """``base_url`` and ``api_key`` reach the policy as OpenAI's API; any ``model`` will do.
    ``seed``: of its random numbers. ``reward``: what the program sets is the trajectory's reward,
    unless it returns one."""

    def __init__(self, base_url: str, api_key: str, seed: int) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self.model = MODEL
        self.seed = seed
        self.reward: float | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables by which other programs reach the policy."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
        }
