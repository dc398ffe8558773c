"""A conversation of several turns as tokens: what was generated is never tokenized again."""
