"""The recipe's JSON Schema allows what the recipe allows; properties that are derived from keys."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema_rs
import pytest
from pydantic import ValidationError

from orchestration.recipe.flow import device_count, needs_reference
from orchestration.recipe.loading.keys import sections
from orchestration.recipe.loading.load import load_recipe, parse_recipe, read_recipe
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe

MOCK: dict[str, Any] = {
    "model": {"source": "mock"},
    "rollout": {"engine": "mock"},
    "train": {"engine": "mock", "steps": 1},
}
# For each table that another model checks: values that are accepted, and some that are refused.
TABLES: list[tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]] = [
    (
        MOCK,
        {"rollout": {"mock": {"sigma": 0.0}}},
        [{"rollout": {"mock": wrong}} for wrong in ({"sigma": -1}, {"sgma": 1})],
    ),
    (MOCK, {"train": {"mock": {"parameters": 8}}}, [{"train": {"mock": {"parameters": 0}}}]),
    (
        {},
        {"algorithm": {"options": {"kl_coef": 0.1}}},
        [{"algorithm": {"options": {"kl_coef": "a lot"}}}],
    ),
    (
        {"algorithm": {"name": "dapo"}},
        {"algorithm": {"options": {"overlong_tokens": 4, "longest_response": 8}}},
        [{"algorithm": {"options": wrong}} for wrong in ({"overlong_tokens": -1}, {"beta": 0.1})],
    ),
    (
        {},
        {"prompts": {"config": {"length": 2}}},
        [{"prompts": {"config": wrong}} for wrong in ({"length": 0}, {"len": 2})],
    ),
    ({}, {"rollout": {"options": {}}}, [{"rollout": {"options": {"cache": 1}}}]),
    ({}, {"rollout": {"device": "cpu"}}, [{"rollout": {"device": "cpu;rm"}}]),
]


@pytest.mark.parametrize(("base", "taken", "refused"), TABLES)
def test_the_json_schema_of_a_table_is_that_of_what_checks_it(
    minimal: Path, base: dict[str, Any], taken: dict[str, Any], refused: list[dict[str, Any]]
) -> None:
    schema = Recipe.model_json_schema()

    def merged(*parts: dict[str, Any]) -> dict[str, Any]:
        made = copy.deepcopy(read_recipe(minimal)[0])
        for part in parts:
            for section, keys in part.items():
                made.setdefault(section, {}).update(keys)
        return made

    sound = merged(base, taken)
    parse_recipe(sound)
    jsonschema.validate(sound, schema)
    for wrong in refused:
        with pytest.raises(RecipeError):
            parse_recipe(merged(base, wrong))
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(merged(base, wrong), schema)


# Of every type, in and out of most ranges.
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    3,
    2**60,
    0.5,
    -0.5,
    "",
    "x",
    "a b",
    "embedded",
    "redis://h",
    "http://h",
    "cuda:1",
]
VALUES += [
    "cpu;rm",
    "64MiB",
    "64 mib",
    "1.5GB",
    "64XB",
    "0",
    "0MiB",
    "-1MiB",
    [],
    [1],
    ["x"],
    ["rollout"],
    ["x", "x"],
]
VALUES += [[0.9], [0.9, 0.95], [0.9, 1.0], [0.1, 0.2, 0.3], {}]


def test_the_json_schema_takes_what_the_recipe_takes_of_every_key(minimal: Path) -> None:
    """Key by key; how keys fit together is more than a schema can say."""
    schema = Recipe.model_json_schema()
    base = read_recipe(minimal)[0]
    by_schema = jsonschema.Draft202012Validator(schema)
    keys = [tuple(key.key.split(".")) for section in sections() for key in section.keys]
    differ = []
    for path in keys:
        if {"N", "mock", "options", "config"} & set(path):
            continue
        for value in VALUES:
            data = at = copy.deepcopy(base)
            for part in path[:-1]:
                at = at.setdefault(part, {})
            at[path[-1]] = value
            if by_schema.is_valid(data) != _fields_are_sound(data):
                differ.append((".".join(path), value))
    assert differ == []


def _fields_are_sound(data: dict[str, Any]) -> bool:
    try:
        Recipe.model_validate(data, strict=True)
    except ValidationError as error:  # of [prompts] as a whole: how its keys fit together
        return all(
            item["type"] == "fault" and item["loc"][0] == "prompts" for item in error.errors()
        )
    return True


def test_values_can_be_generated_from_the_json_schema() -> None:
    """What a generator of values, as schemathesis, cannot bring into one form is ``raw``."""
    schema = Recipe.model_json_schema()
    canonical = jsonschema_rs.canonicalize(schema, draft=jsonschema_rs.Draft202012)
    assert canonical.kind is not jsonschema_rs.canonical.CanonicalKind.RAW


def test_a_colocated_run_has_as_many_rollout_engines_as_ranks(minimal: Path) -> None:
    assert load_recipe(minimal, ["rollout.workers=3"]).replicas == 3
    colocated = ["launch.placement=colocated", "train.dp=2"]
    assert load_recipe(minimal, colocated).replicas == 2
    assert load_recipe(minimal, [*colocated, "rollout.workers=2"]).replicas == 2


def test_a_reference_is_needed_exactly_with_a_kl_term(minimal: Path) -> None:
    assert not needs_reference(load_recipe(minimal))
    assert needs_reference(load_recipe(minimal, ["algorithm.options.kl_coef=0.05"]))


def test_devices_of_a_run_are_counted_without_its_code(minimal: Path) -> None:
    """A run is listed and read where its modules cannot be imported."""
    tables = load_recipe(minimal).model_dump()
    tables["stages"] = [{"use": "not_here:Judge"}]
    assert device_count(Recipe.recorded(tables)) == 2
    tables["stages"] = []
    tables["algorithm"] |= {"name": "not_here:Mine", "options": {}}
    assert device_count(Recipe.recorded(tables)) == 2


def test_a_recipe_cannot_be_changed(minimal: Path) -> None:
    recipe = load_recipe(minimal)
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.steps = 3  # type: ignore[misc]


def test_every_key_that_is_a_path_is_absolute_in_the_recipe_of_a_run(
    minimal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in tables of a list: a host, or a resume from elsewhere, has another working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("")
    recipe = load_recipe(minimal, files=False)
    tables = recipe.model_dump()
    tables["stages"] = [{"use": "my:Judge", "read": ["words.txt", "nowhere"]}]
    tables["reward"]["functions"][0]["read"] = ["words.txt"]
    tables["prompts"] |= {"chat_template": "words.txt"}
    found = Recipe.model_validate(tables).with_absolute_paths()
    words = str(tmp_path / "words.txt")
    assert found.stages[0].read == [words, "nowhere"]
    assert found.reward.functions[0].read == [words]
    assert found.prompts.chat_template == words


def test_options_of_the_algorithm_are_parsed_once_for_each_recipe(minimal: Path) -> None:
    recipe = load_recipe(minimal, ["algorithm.name=dr_grpo"])
    typed: Any = recipe.typed_algorithm
    assert recipe.typed_algorithm is typed
    assert typed.response_tokens == recipe.rollout.max_tokens == 64
    longer = recipe.rollout.model_copy(update={"max_tokens": 65})
    changed: Any = recipe.model_copy(update={"rollout": longer})
    assert changed.typed_algorithm.response_tokens == 65, "what is parsed belongs to one recipe"
    assert load_recipe(minimal, ["algorithm.name=dr_grpo"]) == recipe
    assert "typed_algorithm" not in recipe.to_json()
