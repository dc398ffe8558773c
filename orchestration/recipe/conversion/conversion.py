"""What becomes of each key of another trainer's configuration.

YAML, or key=value in a script ─▶ read_settings ─▶ settings by dotted key
settings ─▶ rules of its trainer (trl.py, verl.py) ─▶ keys of a recipe, and what is left to do
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*\.[\w.]+)=(.*)", re.DOTALL)


class NotConverted(ValueError):
    """The file is none that can be converted; the message says why."""


@dataclass(frozen=True)
class To:
    """The recipe's ``key`` of a setting. ``value`` of it: a function, or a table by the setting's
    text; None of it: the recipe's default says the same."""

    key: str
    value: Callable[[Any], Any] | Mapping[Any, Any] = lambda value: value
    note: str = ""

    def of(self, value: Any) -> Any:
        """Raises LookupError for a value that has no equal here."""
        return self.value[value] if isinstance(self.value, Mapping) else self.value(value)


@dataclass(frozen=True)
class By:
    """A setting that becomes ``keys`` together with others."""

    keys: str


@dataclass(frozen=True)
class Not:
    """A setting that is not carried over, and what to do instead; "": it has no effect here."""

    note: str = ""


Rule = To | By | Not


@dataclass
class Conversion:
    """``recipe`` by dotted keys; ``carried``: settings with the key that each became; ``remarks``:
    settings with what is to be done about them."""

    recipe: dict[str, Any] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)

    def put(self, key: str, value: Any, *settings: str) -> None:
        """Set a key of the recipe, which came from ``settings``."""
        if value is not None:
            self.recipe[key] = value
        self.carried |= dict.fromkeys(settings, key)

    def tables(self) -> dict[str, Any]:
        """Return the recipe as nested tables. Evaluations need rows that are held out."""
        if "evaluate.every" in self.recipe:
            self.recipe.setdefault("prompts.held_out", 0.1)
        tables: dict[str, Any] = {}
        for key, value in self.recipe.items():
            *sections, name = key.split(".")
            table = tables
            for section in sections:
                table = table.setdefault(section, {})
            table[name] = value
        return tables


def apply_rules(settings: Mapping[str, Any], rules: Mapping[str, Rule]) -> Conversion:
    """Return the conversion of ``settings`` by ``rules``, each for a setting alone."""
    done = Conversion()
    for name, value in settings.items():
        match rules.get(name):
            case None:
                done.remarks[name] = "is not known to this converter"
            case Not(note):
                if note and value not in (None, False, ""):
                    done.remarks[name] = note
            case To() as rule if value is not None:
                try:
                    done.put(rule.key, rule.of(value), name)
                except LookupError:
                    done.remarks[name] = f"{value!r} has no equal here"
                if rule.note:
                    done.remarks[name] = rule.note
    return done


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in ``path`` by dotted key: of a YAML file, or of a script the words
    ``a.key=value`` of its commands. Raises NotConverted."""
    import yaml

    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix not in (".yaml", ".yml", ".json"):
            words = shlex.split(text.replace("\\\n", " "), comments=True)
            matches = [match for word in words if (match := OVERRIDE.fullmatch(word))]
            settings = {match[1]: yaml.safe_load(match[2]) for match in matches}
            if not settings:
                raise NotConverted(f"{path} has no words as a.key=value; give the YAML file")
            return settings
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise NotConverted(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise NotConverted(f"{path} is no table of settings; give a trainer's YAML file")
    return dict(_flat(content))


def _flat(tables: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        name = f"{before}{key}"
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def source_of(path: object, default: str) -> str:
    """Return the kind of source that a file with prompts is, by its name."""
    suffix = str(path).rpartition(".")[2]
    return {"jsonl": "jsonl", "json": "jsonl", "parquet": "parquet"}.get(suffix, default)


def as_number(value: Any) -> Any:
    """Return a number that YAML has read as a text, such as ``1e-6``."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        raise LookupError(value) from None
