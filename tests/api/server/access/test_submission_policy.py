"""Recipes in requests: the attacks that they could carry.

What is refused is never imported and never looked at.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.server.access.settings import Settings
from api.server.access.submission_policy import accept, stored_recipe, stored_recipes
from orchestration.recipe.model_files import MODEL_KEYS
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from tests.orchestration.runs import MOCK

CANARY = "asyncdock_canary"


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that anybody could name, and that leaves a file when it is imported."""
    trace = tmp_path / "imported"
    code = (
        f"open({str(trace)!r}, 'w').close()\ndef reward(completions, **_): return [0.0 for _ "
        f"in "
        f"completions]\n"
    )
    (tmp_path / f"{CANARY}.py").write_text(code + "class Algorithm: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return trace


def recipe(**changes: Any) -> dict[str, Any]:
    data = copy.deepcopy(MOCK)
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            data.setdefault(section, {})[name] = value
        else:
            data[section] = value
    return data


def refused(
    data: dict[str, Any], *, overrides: dict[str, Any] | None = None, **given: Any
) -> dict[str, Any]:
    """The problems of a recipe, by their keys."""
    with pytest.raises(RecipeError) as raised:
        accept(Settings(data=Path(), **given), data, overrides or {})
    return {problem.key: problem for problem in raised.value.problems}


def test_a_sound_recipe_is_what_it_says() -> None:
    accepted = accept(
        Settings(data=Path()), recipe(), {"train.steps": 3, "reward.functions.0.weight": 0.5}
    )
    assert (accepted.train.steps, accepted.reward.functions[0].weight) == (3, 0.5)


def test_arguments_of_vllm_are_not_taken_from_a_request() -> None:
    """Some are paths, and trust_remote_code has vLLM import what lies in a model's folder."""
    vllm = {"trust_remote_code": True, "block_size": 32}
    found = refused(recipe(rollout__vllm=vllm), overrides={"rollout.vllm.tokenizer": "/etc"})
    for name in ("trust_remote_code", "tokenizer"):
        assert "is passed to vLLM as it is, which a request may not" in str(
            found[f"rollout.vllm.{name}"]
        )
    assert "rollout.vllm.block_size" not in found


# --- code
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "key"),
    [
        (recipe(reward={"functions": [{"name": f"{CANARY}:reward"}]}), "reward.functions.0.name"),
        (
            recipe(reward={"functions": [{"name": "spelling"}, {"name": f"{CANARY}:x"}]}),
            "reward.functions.1.name",
        ),
        (
            recipe(reward={"functions": [{"name": f"{CANARY}:reward"}, 7]}),
            "reward.functions.0.name",
        ),
        (recipe(algorithm={"name": f"{CANARY}:Algorithm", "group_size": 4}), "algorithm.name"),
        (recipe(prompts={"source": "datasets", "path": f"{CANARY}:rows"}), "prompts.path"),
        (recipe(prompts={"source": "jsonl", "path": f"{CANARY}:rows"}), "prompts.path"),
        (recipe(reward={"functions": [{"name": "os:system"}]}), "reward.functions.0.name"),
        (recipe(rollout__engine=f"{CANARY}:engine"), "rollout.engine"),
        (
            recipe(train__engine=f"{CANARY}:engine", train__options={"command": "id"}),
            "train.engine",
        ),
        (
            recipe(reward={"functions": [{"name": f"{CANARY}:reward", "weight": "x"}]}),
            "reward.functions.0.name",
        ),
    ],
)
def test_code_that_is_not_allowed_is_refused_and_never_imported(
    data: dict[str, Any], key: str, canary: Path
) -> None:
    problem = refused(data)[key]
    assert "does not run" in problem.wrong
    assert not canary.exists()


def test_code_is_refused_in_overrides_too(canary: Path) -> None:
    overrides = {
        "reward.functions.0.name": f"{CANARY}:reward",
        "algorithm.name": f"{CANARY}:Algorithm",
    }
    assert {"reward.functions.0.name", "algorithm.name"} <= set(
        refused(recipe(), overrides=overrides)
    )
    functions = {"reward.functions": [{"name": f"{CANARY}:reward"}]}
    assert "reward.functions.0.name" in refused(recipe(), overrides=functions)
    assert "reward.functions.0.name" in refused(
        recipe(), overrides={"reward": {"functions": functions["reward.functions"]}}
    )
    assert not canary.exists()


def test_code_that_the_operator_allows_is_taken_and_only_that(canary: Path) -> None:
    name = f"{CANARY}:reward"
    data = recipe(reward={"functions": [{"name": name}]})
    allowed = accept(Settings(data=Path(), allow_rewards=frozenset([name])), data, {})
    assert allowed.reward.functions[0].name == name
    assert canary.exists()
    other = recipe(reward={"functions": [{"name": f"{CANARY}:Algorithm"}]})
    assert "reward.functions.0.name" in refused(other, allow_rewards={name})
    assert "algorithm.name" in refused(recipe(algorithm__name=name), allow_rewards={name})
    stages = {**data, "stages": [{"use": "tests.orchestration.run.test_flow:Judge"}, {"use": name}]}
    assert {"stages.0.use", "stages.1.use"} <= set(refused(stages, allow_rewards={name}))
    assert "rollout.engine" in refused(
        recipe(rollout__engine=name), allow_rewards={name}, allow_algorithms={name}
    )


def test_an_engine_that_the_operator_allows_is_taken() -> None:
    name = "tests.stages.engines.echo:engine"
    data = recipe(rollout={"engine": name, "max_rows": 32, "max_tokens": 4})
    assert (
        accept(Settings(data=Path(), allow_engines=frozenset([name])), data, {}).rollout.engine
        == name
    )
    assert "rollout.engine" in refused(data, allow_engines={"tests.stages.engines.counting:engine"})


@pytest.mark.parametrize(
    "template",
    [
        "{prompt.__class__}",
        "{prompt[0]}",
        "{prompt:>1000000000}",
        "{prompt!r:>{answer}}",
        "{0}",
        "{",
        "{}",
    ],
)
def test_a_template_that_reaches_into_its_columns_is_refused(template: str) -> None:
    assert "prompts.template" in refused(recipe(prompts__template=template))


@pytest.mark.parametrize(
    "template", ["{prompt}", "Q: {prompt} {{literally}} A:", "{question} {prompt}"]
)
def test_a_template_that_names_columns_is_taken(template: str) -> None:
    assert (
        accept(Settings(data=Path()), recipe(prompts__template=template), {}).prompts.template
        == template
    )


# --- paths
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """A root with a file in it, and one outside of it that links lead to."""
    root = tmp_path / "root"
    outside = tmp_path / "outside"
    for folder in (root / "inner", outside):
        folder.mkdir(parents=True)
        (folder / "rows.jsonl").write_text('{"prompt": "say a", "answer": "a"}\n')
    (root / "link.jsonl").symlink_to(outside / "rows.jsonl")
    (root / "linked").symlink_to(outside)
    (tmp_path / "root-twin").mkdir()
    (tmp_path / "root-twin" / "rows.jsonl").write_text('{"prompt": "say a", "answer": "a"}\n')
    return root, outside


def prompts(path: str, **more: Any) -> dict[str, Any]:
    return recipe(prompts={"source": "jsonl", "path": path, "max_prompt_tokens": 16, **more})


@pytest.mark.parametrize(
    "path",
    [
        "{outside}/rows.jsonl",
        "{root}/../outside/rows.jsonl",
        "{root}/inner/../../outside/rows.jsonl",
        "../outside/rows.jsonl",
        "inner/../../outside/rows.jsonl",
        "{root}/link.jsonl",
        "link.jsonl",
        "{root}/linked/rows.jsonl",
        "{root}-twin/rows.jsonl",
        "/etc/passwd",
        "/etc/there-is-no-such-file",
        "file:///etc/passwd",
    ],
)
def test_a_path_that_leads_out_of_the_roots_is_refused(path: str, roots: tuple[Path, Path]) -> None:
    root, outside = roots
    problem = refused(prompts(path.format(root=root, outside=outside)), roots=(root,))[
        "prompts.path"
    ]
    assert "exist" not in problem.wrong  # the message must not reveal whether a path outside exists


def test_a_home_directory_is_nobodys(roots: tuple[Path, Path]) -> None:
    assert (
        "does not exist"
        in refused(prompts("~/rows.jsonl"), roots=(roots[0],))["prompts.path"].wrong
    )


@pytest.mark.parametrize(
    "path", ["{root}/inner/rows.jsonl", "inner/rows.jsonl", "{root}/inner/../inner/rows.jsonl"]
)
def test_a_path_below_a_root_is_taken_as_what_it_really_is(
    path: str, roots: tuple[Path, Path], tmp_path: Path
) -> None:
    root, _ = roots
    given = {"data": tmp_path, "roots": (tmp_path / "root-twin" / "none", root)}
    taken = accept(Settings(**given), prompts(path.format(root=root), held_out=0.0), {})
    assert taken.prompts.path == os.path.realpath(root / "inner" / "rows.jsonl")


def test_without_roots_no_file_is_read(roots: tuple[Path, Path]) -> None:
    assert "--root" in refused(prompts(str(roots[0] / "inner" / "rows.jsonl")))["prompts.path"].fix


def test_models_and_certificates_lie_below_the_roots_too(roots: tuple[Path, Path]) -> None:
    root, outside = roots
    engines = {"rollout": {"engine": "torch"}, "train": {"engine": "torch", "steps": 1}}
    for key in MODEL_KEYS:
        section, name = key.split(".")
        data = recipe(**engines)
        data[section] = {**data.get(section, {}), name: str(outside)}
        assert key in refused(data, roots=(root,))
    problems = refused(recipe(pipeline__tls_key="/etc/ssl/private/key.pem"), roots=(root,))
    assert "lies outside" in problems["pipeline.tls_key"].wrong


# --- addresses, amounts, names
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"pipeline__index": "redis://elsewhere:6379"}, "pipeline.index"),
        ({"pipeline__index": "unix:///run/other.sock"}, "pipeline.index"),
        ({"pipeline__serve": "0.0.0.0"}, "pipeline.serve"),
        ({"pipeline__serve": "127.0.0.1"}, "pipeline.serve"),
        ({"sync__transport": "network"}, "sync.transport"),
        ({"sync__transport": "network", "pipeline__serve": "127.0.0.1"}, "pipeline.serve"),
        ({"sync__transport": "network", "pipeline__serve": "0.0.0.0"}, "pipeline.serve"),
        ({"sync__transport": "network", "pipeline__serve": "127.0.0.1"}, "sync.transport"),
        ({"pipeline__serve": ["0.0.0.0"]}, "pipeline.serve"),
        ({"pipeline__serve": "127.0.0.1:22"}, "pipeline.serve"),
        ({"name": "n" * 65}, "name"),
        ({"name": "../../etc"}, "name"),
        ({"rollout__workers": 100}, "rollout.workers"),
        ({"pipeline__arena": "900GiB"}, "pipeline.arena"),
        ({"seed": 2**60}, "seed"),
        ({"seed": 10**4000}, "seed"),
        ({"description": "a\0b"}, "description"),
        ({"rollout__mock": {"row_rate": float("inf")}}, "rollout.mock.row_rate"),
    ],
)
def test_what_reaches_past_the_service_or_takes_too_much_is_refused(
    changes: dict[str, Any], key: str
) -> None:
    assert key in refused(recipe(**changes))


def test_a_run_may_take_all_that_the_operator_gives_to_one_and_no_more() -> None:
    """2 workers of the rollout, 3 of the reward and 1 of training."""
    data = recipe(rollout__workers=2, reward__workers=3, pipeline__arena="64MiB")
    accept(Settings(data=Path(), max_workers=6, max_arena=64 << 20), data, {})
    problems = refused(data, max_workers=5, max_arena=(64 << 20) - 1)
    assert problems.keys() == {"rollout.workers", "pipeline.arena"}
    assert problems["rollout.workers"].wrong.startswith("makes 6 workers")
    assert problems["rollout.workers"].fix == "at most 5 fit here"


def test_only_the_addresses_that_the_operator_allows_are_listened_on() -> None:
    """`sync.transport = "network"` in a request opened a port on every address of the
    machine."""
    network = {"sync.transport": "network", "pipeline.serve": "127.0.0.7"}
    assert "pipeline.serve" in refused(recipe(), overrides=network)
    assert "pipeline.serve" in refused(
        recipe(), overrides=network, allow_listen={"127.0.0.1", "127.0.0.70"}
    )
    given = Settings(data=Path(), allow_listen=frozenset(["127.0.0.7"]))
    assert accept(given, recipe(), network).sync_address == "127.0.0.7"
    assert "pipeline.serve" in refused(
        recipe(), overrides={"pipeline.serve": "127.0.0.7:22"}, allow_listen={"127.0.0.7"}
    )
    assert "sync.transport" in refused(
        recipe(sync__transport="network"), allow_listen={"127.0.0.7"}
    )


def test_only_listed_servers_are_asked_as_teachers() -> None:
    section = {"url": "http://127.0.0.1:1/v1", "api_key_variable": "HOME"}
    found = refused(recipe(teacher=section), allow_teachers={"http://127.0.0.1:2/v1"})
    assert list(found) == ["teacher.url"], "it is not asked, and no key is looked up"


def test_checkpoints_are_copied_only_to_listed_places(tmp_path: Path) -> None:
    """`checkpoint.url` may be any folder that the server can write to."""
    place = str(tmp_path)
    for other in (place, f"{place}/below", f"file://{place}/..", "memory://x", ["x"]):
        assert "checkpoint.url" in refused(
            recipe(), overrides={"checkpoint.url": other}, allow_checkpoints={f"file://{place}"}
        )
    given = Settings(data=Path(), allow_checkpoints=frozenset([f"file://{place}"]))
    assert (
        accept(given, recipe(), {"checkpoint.url": f"file://{place}"}).checkpoint.url
        == f"file://{place}"
    )


def test_workers_are_placed_on_listed_clusters_alone() -> None:
    wanted = {"pipeline.serve": "0.0.0.0", "sync.transport": "network"}
    wanted |= {"launch.launcher": "ray", "launch.address": "ray://10.0.0.2:10001"}
    settings: dict[str, Any] = {"allow_listen": {"0.0.0.0"}, "index": "redis://:secret@10.0.0.1"}
    assert "launch.address" in refused(
        recipe(), overrides=wanted, **settings, allow_clusters={"auto"}
    )
    given = Settings(data=Path(), **settings, allow_clusters=frozenset(["ray://10.0.0.2:10001"]))
    assert accept(given, recipe(), wanted).launch.address == "ray://10.0.0.2:10001"


def test_hosts_may_run_workers_where_the_services_index_is_reached_from_other_machines() -> None:
    wanted = {"pipeline.serve": "0.0.0.0", "sync.transport": "network"}
    wanted |= {"launch.remote_rollouts": 1, "launch.launcher": "process"}
    found = refused(recipe(), overrides=wanted, allow_listen={"0.0.0.0"})
    assert "needs an index that other machines reach" in found["launch.remote_rollouts"].wrong
    given = Settings(
        data=Path(), allow_listen=frozenset(["0.0.0.0"]), index="redis://:secret@10.0.0.1"
    )
    accepted = accept(given, recipe(), wanted)
    assert accepted.pipeline.index == "embedded", "no recipe shows the service's index"
    assert accepted.launch.remote_rollouts == 1


@pytest.mark.parametrize("key", [{"launch.remote_rollouts": 1}, {"launch.launcher": "ray"}])
def test_one_key_for_other_machines_opens_ports_only_where_that_is_allowed(
    key: dict[str, Any],
) -> None:
    """Addresses follow from it, and may be any of the machine."""
    [name] = key
    wanted = {"launch.launcher": "process", "launch.address": "ray://10.0.0.2:10001", **key}
    if name != "launch.launcher":
        del wanted["launch.address"]
    settings: dict[str, Any] = {
        "index": "redis://10.0.0.1",
        "allow_clusters": {"ray://10.0.0.2:10001"},
    }
    assert "has the run listen" in refused(recipe(), overrides=wanted, **settings)[name].wrong
    listed = {"overrides": {**wanted, "pipeline.serve": "127.0.0.7"}, "allow_listen": {"127.0.0.7"}}
    found = refused(recipe(), **settings, **listed)
    assert (name in found) == (name == "launch.launcher"), "a cluster chooses the trainer's node"
    given = Settings(
        data=Path(),
        **{**settings, "allow_clusters": frozenset(settings["allow_clusters"])},
        allow_listen=frozenset(["0.0.0.0"]),
    )
    accepted = accept(given, recipe(), wanted)
    assert accepted.spans_machines
    assert accepted.sync_address == accepted.warehouse_address == "auto"


def test_a_deep_recipe_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"a": deep}
    assert any(
        "deep" in problem.wrong for problem in refused(recipe(algorithm__options=deep)).values()
    )
    assert "overrides" in refused(recipe(), overrides={".".join("a" * 100_000): 1})


def test_all_problems_are_told_at_once() -> None:
    data = recipe(
        pipeline__index="redis://x",
        algorithm__name="os:x",
        train__steps=0,
        rollout__temprature=1,
        name=5,
    )
    problems = refused(data, overrides={"train.steps.x": 1, "nothing": 1, "a..b": 2})
    expected = {
        "pipeline.index",
        "algorithm.name",
        "train.steps",
        "rollout.temprature",
        "name",
        "nothing",
        "overrides",
    }
    assert expected <= set(problems)


def test_stored_recipes_are_looked_up_and_never_joined_to_a_path(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.toml").write_text('description = "mine"\n')
    (tmp_path / "secret.toml").write_text('description = "secret"\n')
    given = Settings(data=tmp_path, recipes=(tmp_path / "recipes",))
    assert {"mine", "mock", "quickstart"} <= set(stored_recipes(given))
    assert stored_recipe(given, "mine") == {"name": "mine", "description": "mine"}
    for name in ("../secret", "secret", f"{tmp_path}/secret", "mine.toml", "", ".", "mine\0"):
        with pytest.raises(LookupError):
            stored_recipe(given, name)


def test_a_recipe_in_a_request_extends_stored_recipes_alone(tmp_path: Path) -> None:
    """A path would show the requester a file of the server's machine, also by what is wrong with it."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.toml").write_text('extends = "mock"\n[train]\nsteps = 7\n')
    (tmp_path / "recipes" / "above.toml").write_text('extends = "mine.toml"\nseed = 3\n')
    given = Settings(data=tmp_path, recipes=(tmp_path / "recipes",), roots=(tmp_path,))
    short = accept(given, {"name": "short", "extends": "mock", "train": {"steps": 3}}, {})
    assert (short.name, short.train.steps, short.train.engine) == ("short", 3, "mock")
    assert stored_recipe(given, "mine")["train"] == {
        "engine": "mock",
        "steps": 7,
        "groups_per_step": 4,
    }
    assert accept(given, stored_recipe(given, "above"), {}).train.steps == 7
    (tmp_path / "recipes" / "broken.toml").write_text('extends = "nothing"\n')
    mine = accept(given, {"name": "longer", "extends": "mine", "train": {"steps": 9}}, {})
    assert (mine.name, mine.train.steps, mine.train.engine) == ("longer", 9, "mock")
    for name in (
        "broken",
        str(tmp_path / "recipes" / "mine.toml"),
        "recipes/mine.toml",
        "../recipes/mock",
        "mock.toml",
        "/etc/passwd",
        "",
        3,
        ["mock"],
    ):
        with pytest.raises(RecipeError) as raised:
            accept(given, {"name": "x", "extends": name}, {})
        [problem] = raised.value.problems
        assert (problem.key, problem.value) == ("extends", name)
        assert name == "broken" or "mock" in problem.fix or "tiny" in problem.fix
        assert str(tmp_path) not in f"{problem.wrong}{problem.fix}"
    assert "extends" in refused({**MOCK}, overrides={"extends": "tiny"})
    (tmp_path / "recipes" / "mine.toml").write_text('extends = "nothing"\n')
    with pytest.raises(RecipeError) as raised:
        stored_recipe(given, "mine")
    assert [problem.key for problem in raised.value.problems] == ["recipe_name"]


TABLES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["mock", "a:b", "/x"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
DOTTED_KEYS = (
    [
        f"{name}.{field}"
        for name, info in Recipe.model_fields.items()
        for field in getattr(info.annotation, "model_fields", ())
    ]
    + list(Recipe.model_fields)
    + [
        "reward.functions.0.name",
        "algorithm.options.clip_low",
        "rollout.mock.row_rate",
        "train.mock.x",
    ]
)
KEYS = st.sampled_from(DOTTED_KEYS)


@settings(max_examples=150, deadline=None)
@given(changes=st.dictionaries(KEYS, TABLES, max_size=4))
def test_whatever_a_recipe_says_it_is_taken_or_its_problems_are_told(
    changes: dict[str, Any],
) -> None:
    try:
        accepted = accept(Settings(data=Path()), MOCK, changes)
    except RecipeError as error:
        problems = error.problems
    else:
        problems = []
        assert Recipe.from_json(accepted.to_json()) == accepted
    assert all(problem.key and problem.wrong for problem in problems)


@pytest.mark.parametrize("value", [[["x"]], {"0": ["x"]}], ids=["list", "table"])
@pytest.mark.parametrize("base", [{}, {"launch.launcher": "ray"}], ids=["one machine", "cluster"])
def test_a_list_or_a_table_where_a_name_belongs_is_a_problem_at_each_key(
    base: dict[str, Any], value: Any
) -> None:
    # such a value has no hash: it cannot be looked up among the names that an operator allows
    for key in DOTTED_KEYS:
        with contextlib.suppress(RecipeError):
            accept(Settings(data=Path()), MOCK, {**base, key: value})
    for key in ("launch.launcher", "launch.address", "name", "pipeline.index", "teacher.url"):
        assert key in refused({**MOCK}, overrides={**base, key: value})


@pytest.mark.parametrize("name", ["mock", "tiny", "guess"])
def test_recipes_of_the_package_may_be_submitted_as_they_are(name: str) -> None:
    given = Settings(data=Path())
    assert accept(given, stored_recipe(given, name), {}).name == name


# --- sandboxes
# --------------------------------------------------------------------------------------------------

SCORES = "tests.orchestration.scores:early_letters"


def confined(functions: list[dict[str, Any]], **section: Any) -> dict[str, Any]:
    return recipe(reward={"functions": functions, **section})


def test_functions_of_requests_run_in_a_sandbox_and_see_no_environment() -> None:
    settings = Settings(data=Path(), allow_rewards=frozenset({SCORES}))
    reward = accept(settings, confined([{"name": SCORES}, {"name": "spelling"}]), {}).reward
    assert [function.is_sandboxed for function in reward.functions] == [True, False]
    assert reward.environment == []
    free = settings.model_copy(update={"unsandboxed_code": True})
    reward = accept(free, confined([{"name": SCORES}]), {}).reward
    assert [function.is_sandboxed for function in reward.functions] == [False]
    assert reward.environment == []


def test_what_a_sandbox_lets_through_is_allowed_by_name(tmp_path: Path) -> None:
    wants = {"name": SCORES, "sandbox": False, "network": True, "read": ["/etc/passwd"]}
    data = confined([wants], environment=["HOME", "MY_JUDGE_KEY"], processes=0)
    given = {
        "allow_rewards": frozenset({SCORES}),
        "allow_environment": frozenset({"HOME"}),
        "roots": (tmp_path,),
    }
    found = refused(data, **given)
    fixes = {
        "reward.functions.0.sandbox": "--unsandboxed-code",
        "reward.functions.0.network": f"--allow-network {SCORES}",
        "reward.functions.0.read.0": str(tmp_path),
        "reward.environment.1": "--allow-environment MY_JUDGE_KEY",
        "reward.processes": "--unsandboxed-code",
    }
    assert {key: fix in found[key].fix for key, fix in fixes.items()} == dict.fromkeys(fixes, True)
    assert "reward.environment.0" not in found
    (tmp_path / "words.txt").write_text("")
    data = confined(
        [{"name": SCORES, "network": True, "read": ["words.txt"]}], environment=["HOME"]
    )
    accepted = accept(
        Settings(data=Path(), allow_networks=frozenset({SCORES}), **given), data, {}
    ).reward
    assert (accepted.functions[0].network, accepted.functions[0].read) == (
        True,
        [str(tmp_path / "words.txt")],
    )


def test_overrides_do_not_undo_a_sandbox() -> None:
    data = confined([{"name": SCORES}])
    given = {"allow_rewards": frozenset({SCORES})}
    found = refused(
        data, overrides={"reward.functions.0.sandbox": False, "reward.environment": ["X"]}, **given
    )
    assert {"reward.functions.0.sandbox", "reward.environment.0"} <= found.keys()


MARKS = "tests.orchestration.run.hostile_stages:Marks"
READS_MARKS = "tests.orchestration.run.hostile_stages:bare_mark"
ALLOWED: dict[str, Any] = {
    "allow_stages": frozenset({MARKS}),
    "allow_rewards": frozenset({READS_MARKS}),
}


def staged(**stage: Any) -> dict[str, Any]:
    reward = {"functions": [{"name": READS_MARKS}]}
    return recipe(stages=[{"use": MARKS, **stage}], launch={"launcher": "process"}, reward=reward)


def test_stages_of_requests_run_in_a_sandbox() -> None:
    settings = Settings(data=Path(), **ALLOWED)
    assert accept(settings, staged(), {}).stages[0].sandbox
    free = settings.model_copy(update={"unsandboxed_code": True})
    assert not accept(free, staged(), {}).stages[0].sandbox
    assert "stages.0.sandbox" in refused(staged(), overrides={"stages.0.sandbox": False}, **ALLOWED)


def test_what_the_sandbox_of_a_stage_lets_through_is_allowed_by_name(tmp_path: Path) -> None:
    wants = staged(sandbox=False, network=True, read=["/etc/passwd"]) | {
        "launch": {"launcher": "inline"}
    }
    given = {**ALLOWED, "roots": (tmp_path,)}
    found = refused(wants, **given)
    fixes = {
        "stages.0.sandbox": "--unsandboxed-code",
        "stages.0.network": f"--allow-network {MARKS}",
        "stages.0.read.0": str(tmp_path),
        "launch.launcher": "--unsandboxed-code",
    }
    assert {key: fix in found[key].fix for key, fix in fixes.items()} == dict.fromkeys(fixes, True)


SUMS = "tests.stages.environments.examples:Calculator"
GAME = "tests.stages.environments.examples:Guess"


def with_environment(use: Any, **keys: Any) -> dict[str, Any]:
    return recipe(
        model={"source": "tiny"},
        rollout={"engine": "torch", "max_tokens": 8},
        train={"engine": "torch", "steps": 1},
        prompts={"source": "builtin", "task": "guess", "max_prompt_tokens": 8},
        environment={"use": use, "tools": "text", **keys},
        launch={"launcher": "process"},
    )


def test_environments_of_requests_run_in_a_sandbox(tmp_path: Path) -> None:
    settings = Settings(data=Path(), allow_stages=frozenset({SUMS}), roots=(tmp_path,))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "a", "environment": "sums"}\n')
    several = with_environment({"sums": SUMS, "games": "guess"})
    several["prompts"] = {"source": "jsonl", "path": str(rows), "max_prompt_tokens": 8}
    for tables in (with_environment("guess"), with_environment(SUMS), several):
        accepted = accept(settings, tables, {})
        use = tables["environment"]["use"]
        assert accepted.environment.use == use
        assert accepted.environment.sandbox
        assert accepted.reward.environment == []
    free = settings.model_copy(update={"unsandboxed_code": True})
    assert not accept(free, with_environment(SUMS), {}).environment.sandbox
    found = refused(with_environment("guess"), overrides={"environment.sandbox": False})
    assert found.keys() == {"environment.sandbox"}


@pytest.mark.parametrize(
    ("use", "keys"),
    [
        (f"{CANARY}:Algorithm", {"environment.use"}),
        ({"games": "guess", "a": f"{CANARY}:Algorithm"}, {"environment.use.a"}),
        (
            {"a.b": f"{CANARY}:Algorithm", "": "os:system"},
            {"environment.use.a.b", "environment.use."},
        ),
    ],
)
def test_an_environment_that_is_not_allowed_is_refused_and_never_imported(
    use: Any, keys: set[str], canary: Path
) -> None:
    data = with_environment(use, options={"a": {"b": 1}})
    found = refused(data, allow_rewards={f"{CANARY}:Algorithm"})
    assert found.keys() == keys
    assert all("--allow-stage" in problem.fix for problem in found.values())
    assert refused(with_environment("guess"), overrides={"environment.use": use}).keys() == keys
    assert not canary.exists()


def test_what_the_sandbox_of_environments_lets_through_is_allowed_by_name(tmp_path: Path) -> None:
    wants = {"network": True, "read": ["/etc/passwd"]}
    given: dict[str, Any] = {"allow_stages": frozenset({SUMS, GAME}), "roots": (tmp_path,)}
    both = with_environment({"sums": SUMS, "games": GAME}, sandbox=False, **wants)
    found = refused(
        both, overrides={"launch.launcher": "inline"}, **given, allow_networks=frozenset({GAME})
    )
    fixes = {
        "environment.sandbox": "--unsandboxed-code",
        "environment.network": f"--allow-network {SUMS}",
        "environment.read.0": str(tmp_path),
        "launch.launcher": "--unsandboxed-code",
    }
    assert {key: fix in found[key].fix for key, fix in fixes.items()} == dict.fromkeys(fixes, True)
    assert GAME not in found["environment.network"].fix
    (tmp_path / "words.txt").write_text("")
    accepted = accept(
        Settings(data=Path(), allow_networks=frozenset({SUMS}), **given),
        with_environment(SUMS, network=True, read=["words.txt"]),
        {},
    ).environment
    assert (accepted.network, accepted.read) == (True, [str(tmp_path / "words.txt")])


def test_code_sees_no_environment_in_a_recipe_without_rewards() -> None:
    """Its variables stand in the section of rewards, which such a recipe has not."""
    distilled = {
        **with_environment("guess"),
        "algorithm": {"name": "distillation", "group_size": 4},
        "model": {"source": "tiny", "reference": "tiny"},
    }
    del distilled["reward"]
    assert accept(Settings(data=Path()), distilled, {}).reward.environment == []


def test_processes_of_environments_count_among_the_workers_of_a_run() -> None:
    accept(Settings(data=Path(), max_workers=32), with_environment("guess", processes=20), {})
    found = refused(with_environment("guess", processes=60), max_workers=32)
    assert "makes" in found["rollout.workers"].wrong


def test_workers_of_stages_count_among_those_of_a_run() -> None:
    accept(Settings(data=Path(), **ALLOWED, max_workers=32), staged(workers=20), {})
    found = refused(staged(workers=60), **ALLOWED, max_workers=32)
    assert "makes" in found["rollout.workers"].wrong
