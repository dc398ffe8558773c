"""What becomes of each key of another trainer's configuration.

YAML, or key=value in a script (script.py) ─▶ read_settings ─▶ settings by dotted key
settings ─▶ rules of its trainer (trl.py, verl.py) ─▶ keys of a recipe, and what is left to do
         ─▶ sound: what the recipe's own checks refuse becomes a remark
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestration.recipe.conversion import script

# another key, in OmegaConf: ${a.key}, ${oc.select:a.key, default}
REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*([\w.]+)\s*(?:,(.*))?\}", re.DOTALL)


MISSING = "???"  # Hydra's: has to be given
CLASSES = "_target_"  # keys of Hydra's: the class of a table


class NotConverted(ValueError):
    """The file is none that can be converted; the message says why."""


class Unresolved(str):
    """A value with a variable, or a reference, that is not known."""


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
    """A setting that becomes ``keys`` together with others. ``value`` of it: a function, which
    raises LookupError for what cannot be carried over."""

    keys: str
    value: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Not:
    """A setting that is not carried over, and what to do instead; "": it has no effect here."""

    note: str = ""


Rule = To | By | Not


@dataclass
class Conversion:
    """``recipe`` by dotted keys; ``carried``: settings with the key that each became; ``remarks``:
    settings with what is to be done about them; ``unknown``: those without a rule, but for what is
    off."""

    recipe: dict[str, Any] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def put(self, key: str, value: Any, *settings: str) -> None:
        """Set a key of the recipe, which came from ``settings``."""
        if value is not None:
            self.recipe[key] = value
        self.carried |= dict.fromkeys(settings, key)

    def refuse(self, key: str, why: str) -> None:
        """Take ``key`` out of the recipe, and remark ``why`` at the settings that it came from."""
        del self.recipe[key]
        settings = [name for name, carried in self.carried.items() if carried == key]
        for name in settings:
            del self.carried[name]
        self.remarks |= dict.fromkeys(settings or [f"({key})"], why)

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


def apply_rules(
    settings: Mapping[str, Any], rules: Mapping[str, Rule]
) -> tuple[Conversion, dict[str, Any]]:
    """Apply ``rules`` to ``settings``, one setting at a time. Return the conversion, and the
    settings that have a usable value, in which a text such as ``"1e-6"`` is a number."""
    done = Conversion()
    readable = dict[str, Any]()
    for name, value in settings.items():
        if value is None or value == MISSING:
            continue
        if isinstance(value, Unresolved):
            if name in rules:
                done.remarks[name] = f"{value!r} is not known here: put its value"
            else:
                done.unknown.append(name)
            continue
        readable[name] = value
        match rules.get(name):
            case None:
                if value not in (False, [], {}) and not name.endswith(CLASSES):
                    done.unknown.append(name)
            case Not(note):
                if note and value not in (False, ""):
                    done.remarks[name] = note
            case By() as rule:
                try:
                    readable[name] = rule.value(value)
                except LookupError:
                    done.remarks[name] = f"{value!r} has no equal here"
                    del readable[name]
            case To() as rule:
                try:
                    done.put(rule.key, rule.of(value), name)
                except (LookupError, TypeError, ValueError):
                    done.remarks[name] = f"{value!r} has no equal here"
                if rule.note:
                    done.remarks[name] = rule.note
    return done, readable


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in ``path`` by dotted key: of a YAML file, or of a script the words
    ``a.key=value``, else ``--key value``, of its commands. Raises NotConverted."""
    import yaml

    is_script = path.suffix not in (".yaml", ".yml", ".json")
    try:
        text = path.read_text(encoding="utf-8")
        content = _of_script(text) if is_script else yaml.safe_load(text)
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        raise NotConverted(f"{path} cannot be read: {error}") from error
    if is_script and not content:
        raise NotConverted(f"{path} has no words as a.key=value or --key; give the YAML file")
    if not isinstance(content, dict):
        raise NotConverted(f"{path} is no table of settings; give a trainer's YAML file")
    settings = dict(_flat(content))
    return {name: _referred(value, settings) for name, value in settings.items()}


def _of_script(text: str) -> dict[str, Any]:
    if overrides := {name: _parsed(value) for name, value in script.overrides(text)}:
        return overrides
    return {name: _value([*map(_parsed, words)]) for name, words in script.flags(text)}


def _parsed(text: str) -> Any:
    """Return the value that a command's argument is; a text stays one, whatever is in it."""
    import yaml

    if script.UNKNOWN.search(text):
        return Unresolved(text)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, dict) and not text.startswith("{") else value


def _value(words: Sequence[Any]) -> Any:
    """Return the value of a flag with ``words`` after it: a switch is on."""
    if not words:
        return True
    return words[0] if len(words) == 1 else [*words]


def _referred(value: Any, settings: Mapping[str, Any]) -> Any:
    """Return the value of the key that ``value`` refers to, where it is in ``settings``."""
    for _ in settings:  # a circle ends
        match = REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            break
        if match[1] in settings:
            value = settings[match[1]]
        elif match[2]:
            value = _parsed(match[2])
        else:
            break
    return Unresolved(value) if isinstance(value, str) and "${" in value else value


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


def put_steps(done: Conversion, name: str, epochs: float) -> None:
    """Set the steps that so many ``epochs``, the setting ``name``, take of a file that is here."""
    groups = done.recipe.get("train.groups_per_step", 0)
    rows = _rows(Path(str(done.recipe.get("prompts.path", ""))))
    if "train.steps" in done.recipe:
        return
    if rows and groups > 0 and epochs > 0:
        done.put("train.steps", max(1, int(epochs * (rows // groups))), name)
    else:
        done.remarks[name] = "put the number of optimizer steps into train.steps"


def _rows(path: Path) -> int:
    """Return the rows of the file ``path``; 0 where they cannot be counted."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return int(pyarrow.parquet.read_metadata(path).num_rows)
        if path.suffix in (".jsonl", ".json"):
            with path.open("rb") as lines:
                return sum(not line.isspace() for line in lines)
    except (OSError, ValueError, ImportError):
        pass
    return 0


def as_text(value: Any) -> str:
    """Return ``value``. Raises LookupError for what is no text."""
    if not isinstance(value, str):
        raise LookupError(value)
    return value


def as_number(value: Any) -> Any:
    """Return ``value``, or the number that YAML has read as a text, such as ``1e-6``. Raises
    LookupError for what is none."""
    if isinstance(value, str):
        try:
            return int(value) if value.isdigit() else float(value)
        except ValueError:
            raise LookupError(value) from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LookupError(value)
    return value
