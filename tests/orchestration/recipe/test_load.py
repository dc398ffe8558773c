"""A recipe is valid, or all of its problems are reported at once with key, value and fix."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestration.recipe.field_problems import FUTURE_KEYS
from orchestration.recipe.loading.load import (
    MOST_EXTENDED,
    change_recipe,
    load_recipe,
    override,
    parse_recipe,
    recorded_recipe,
)
from orchestration.recipe.problems import RecipeError
from orchestration.recipe.schema import Recipe
from orchestration.recipe.sections.retired import RENAMED_VALUES, RETIRED, Retired
from orchestration.run.folder import RunFolder
from orchestration.workers.engines import rollout_engine
from stages.parallel.layout import parse_layout
from tests.orchestration.recipe.minimal import MINIMAL, problems

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_of_the_package_are_sound_and_described(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert recipe.description
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_keys_that_are_left_out_have_defaults(minimal: Path) -> None:
    recipe = load_recipe(minimal)
    assert (recipe.name, recipe.seed) == ("minimal", 0)
    assert recipe.algorithm.name == "grpo"
    assert recipe.pipeline.staleness == 1
    assert recipe.pipeline.window == 1
    assert recipe.launch.launcher == "process"


@pytest.mark.parametrize(
    ("override", "at", "value"),
    [
        ("train.steps=7", "train.steps", 7),
        ("train.learning_rate=3e-4", "train.learning_rate", 3e-4),
        ("train.learning_rate=1", "train.learning_rate", 1.0),
        ("train.betas=[0.8, 0.9]", "train.betas", (0.8, 0.9)),
        ("train.activation_checkpointing=true", "train.activation_checkpointing", True),
        ("pipeline.arena=96MiB", "pipeline.arena", 96 * 2**20),
        ("pipeline.arena=100000000", "pipeline.arena", 10**8),
        ("pipeline.index=redis://h:1/0", "pipeline.index", "redis://h:1/0"),
        ("model.dtype=bfloat16", "model.dtype", "bfloat16"),
        ("model.dtype='bfloat16'", "model.dtype", "bfloat16"),
        ("name=run-2", "name", "run-2"),
        ('rollout.stop=["a=b", "c"]', "rollout.stop", ["a=b", "c"]),
        ("algorithm.options.kl_coef=0.1", "algorithm.options", {"kl_coef": 0.1}),
        ("reward.functions.0.weight=2", "reward.functions", None),
    ],
)
def test_overrides_are_toml_values_or_else_strings(
    minimal: Path, override: str, at: str, value: Any
) -> None:
    found: Any = load_recipe(minimal, [override])
    for part in at.split("."):
        found = getattr(found, part)
    if value is None:
        assert [function.weight for function in found] == [2.0]
    else:
        assert found == value
        assert type(found) is type(value)


# One fault each: the override, the key that is blamed, and what the fix has to say.
FAULTS = [
    ("train.stepz=3", "train.stepz", "did you mean 'steps'?"),
    ("lunch.launcher=inline", "lunch", "did you mean 'launch'?"),
    ("train.steps=0", "train.steps", ">= 1"),
    ("train.steps=1.5", "train.steps", "a whole number"),
    ("train.steps=true", "train.steps", "a whole number"),
    ("train.steps=ten", "train.steps", "a whole number"),
    ("train.learning_rate=nan", "train.learning_rate", "a finite number"),
    ("train.learning_rate='1e-5'", "train.learning_rate", "a number"),
    ("train.betas=[0.9]", "train.betas.1", "train.betas"),
    ("train.betas=[0.9, 1.0]", "train.betas.1", "< 1"),
    ("train.schedule=cosin", "train.schedule", "did you mean 'cosine'?"),
    ("train=3", "train", "a table"),
    ("name=../../etc", "name", "letters, digits"),
    ("seed=-1", "seed", ">= 0"),
    ("model.dtype=int8", "model.dtype", "'float32'"),
    ("pipeline.arena=64XB", "pipeline.arena", "'64MiB'"),
    ("pipeline.index=http://h", "pipeline.index", "redis://"),
    ("prompts.task=repeet", "prompts.task", "repeat"),
    ("prompts.held_out='0.1'", "prompts.held_out", "a number"),
    ("reward.functions=[]", "reward.functions", "at least 1"),
    ("reward.functions=[{nam='spelling'}]", "reward.functions.0.nam", "did you mean 'name'?"),
    ("reward.functions=[{name='speling'}]", "reward.functions.0.name", "spelling"),
    ("reward.functions=[{name='nowhere.at.all:f'}]", "reward.functions.0.name", "PYTHONPATH"),
    ("reward.functions=[{name='math:sqrt'}]", "reward.functions.0.name", "remove the /"),
    (
        "reward.functions=[{name='builtins:max'}]",
        "reward.functions.0.name",
        "wrap it in a function",
    ),
    ("reward.functions=[{name='ast:walk'}]", "reward.functions.0.name", "return them as a list"),
    ("reward.on_error=ignore", "reward.on_error", "'drop'"),
    ("reward.timeout=0", "reward.timeout", "> 0"),
    ("reward.max_error_share=1.5", "reward.max_error_share", "1"),
    (
        "reward.functions=[{name='spelling'},{name='spelling'}]",
        "reward.functions.1.name",
        "add up the weights",
    ),
    ("reward.functions=[{name='spelling',weight=0}]", "reward.functions", "another weight"),
    ("algorithm.name=pppo", "algorithm.name", "grpo"),
    ("algorithm.name=collections:Counter", "algorithm.name", "stages.algorithms.Algorithm"),
    ("algorithm.name=nowhere.at.all:A", "algorithm.name", "PYTHONPATH"),
    ("algorithm.options.kl_coeff=0.1", "algorithm.options.kl_coeff", "did you mean 'kl_coef'?"),
    ("algorithm.options.kl_coef=-1", "algorithm.options.kl_coef", ">= 0"),
    ("algorithm.options.scale_rewards=1", "algorithm.options.scale_rewards", "true or false"),
    ("algorithm.group_size=1", "algorithm.group_size", ">= 2"),
    ("model.source=mock", "rollout.engine", "'mock'"),
    ("train.engine=mock", "train.engine", "'torch'"),
    ("train.mock.step_seconds=1", "train.mock", "remove"),
    ("rollout.engine=vlm", "rollout.engine", "did you mean 'vllm'?"),
    ("rollout.vllm.max_model_len=64", "rollout.vllm", "remove the table"),
    ("model.source=smolm2", "model.source", "did you mean 'smollm2'?"),
    ("rollout.max_rows=4", "rollout.max_rows", ">= 8"),
    *[
        (f"rollout.temperature={value}", "rollout.temperature", ">= 1e-06")
        for value in ("0", "1e-300", "5e-324", "-1")
    ],
    *[
        (f"rollout.temperature={value}", "rollout.temperature", "a finite number")
        for value in ("nan", "inf")
    ],
    ("rollout.temperature=1e300", "rollout.temperature", "<= 100"),
    *[(f"rollout.top_p={value}", "rollout.top_p", ">= 1e-30") for value in ("0", "1e-300")],
    ("rollout.top_p=nan", "rollout.top_p", "a finite number"),
    ("rollout.top_k=100000000000000000000", "rollout.top_k", "smaller"),
    ("rollout.stop=['']", "rollout.stop.0", "at least 1 character"),
    ("train.token_budget=100", "train.token_budget", ">= "),
    ("train.warmup_steps=11", "train.warmup_steps", "<= 10"),
    ("pipeline.window=6", "pipeline.window", "pipeline.staleness >= 3"),
    ("pipeline.arena=1KiB", "pipeline.arena", "pipeline.arena = '"),
    ("evaluate.every=5", "prompts.held_out", "0.1"),
    (f"rollout.threads={(os.cpu_count() or 1) + 1}", "rollout.threads", "automatic"),
    ("train.dp=0", "train.dp", ">= 1"),
    ("train.device=", "train.device", "use one of: auto, cpu, cuda"),
    ("rollout.device='cpu;rm'", "rollout.device", "use one of: auto, cpu, cuda"),
    ("train.device=cudda:1", "train.device", "did you mean 'cuda'?"),
    ("train.device='cuda:1\\n'", "train.device", "cuda:1, to choose among several"),
    ("rollout.device=cuda:-1", "rollout.device", "cuda:1, to choose among several"),
    ("rollout.device=auto:0", "rollout.device", "cuda:1, to choose among several"),
    ("prompts.config.lenght=4", "prompts.config.lenght", "did you mean 'length'?"),
    ("prompts.config.length=0", "prompts.config.length", ">= 1"),
    ("train.precision=mixed", "train.precision", "model.dtype = 'bfloat16'"),
    ("train.precision=bf16", "train.precision", "'mixed'"),
    ("train.tp=3", "train.tp", "use one of: 1, 2"),
    (f"train.dp={(os.cpu_count() or 1) + 1}", "train.dp", f"train.tp <= {os.cpu_count() or 1}"),
    ("train.dp=33", "train.dp", "<= 32"),
    ("train.pp=3", "train.pp", "use a value <= 2"),
    ("train.vpp=2", "train.vpp", "set train.vpp = 1, or train.pp = 2"),
    ("train.pipeline=zbv", "train.pipeline", "train.vpp = 2"),
    ("train.cp=3", "train.cp", "use one of: 1, 2, or set train.context_parallel = 'ring'"),
    ("train.context_parallel=rings", "train.context_parallel", "did you mean 'ring'?"),
    (
        "train.context_parallel=ring",
        "train.context_parallel",
        "set train.cp = 2 or more, or remove it",
    ),
    ("train.ep=2", "train.ep", "set train.ep = 1"),
    ("nonsense", "--set", "train.steps=10"),
    ("train.steps.more=1", "--set", "section"),
    ("reward.functions.7.weight=1", "--set", "section"),
]


@pytest.mark.parametrize(("override", "key", "fix"), FAULTS)
def test_a_fault_names_its_key_its_value_and_its_fix(
    minimal: Path, override: str, key: str, fix: str
) -> None:
    sets = [override]
    if override.startswith("train.token_budget"):
        sets.append("prompts.max_prompt_tokens=90")
    found = problems(minimal, *sets)
    blamed = next((problem for problem in found if problem.key == key), None)
    assert blamed is not None, [str(problem) for problem in found]
    assert fix in blamed.wrong + "; " + blamed.fix
    assert blamed.wrong
    assert str(blamed).startswith(key)


@pytest.mark.parametrize("key", sorted(FUTURE_KEYS))
def test_the_layout_that_is_named_instead_of_what_is_not_there_yet_can_be_planned(
    minimal: Path, key: str
) -> None:
    [blamed] = [problem for problem in problems(minimal, f"{key}=2") if problem.key == key]
    found = parse_layout(blamed.fix.partition("--train ")[2].partition("`")[0], "train")
    assert getattr(found, key.removeprefix("train."), found.dp_shard // 2) == 2


def test_settings_of_the_vllm_engine_are_read(minimal: Path) -> None:
    sets = [
        "model.source=smollm2",
        "rollout.engine=vllm",
        "rollout.vllm.kv_cache_bytes=1GiB",
        "rollout.vllm.kv_cache=rebuild",
    ]
    options = load_recipe(minimal, sets).rollout.vllm
    assert (options.kv_cache_bytes, options.kv_cache, options.max_model_len) == (
        2**30,
        "rebuild",
        None,
    )


def test_other_keys_of_the_vllm_engine_are_arguments_of_it(
    minimal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # those of `tiny`
    monkeypatch.setattr("orchestration.recipe.checks.machine.VLLM_CPU_HEADS", (16,))
    further = {"max_num_batched_tokens": 640, "additional_config": {"enable_cpu_binding": False}}
    sets = [
        "rollout.engine=vllm",
        "rollout.vllm.block_size=32",
        "rollout.vllm.max_num_batched_tokens=640",
    ]
    recipe = load_recipe(
        minimal, [*sets, "rollout.vllm.additional_config.enable_cpu_binding=false"]
    )
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "stages.engines.vllm.rollout.VllmReceivingEngine",
        lambda *_, **options: given.append(options),
    )
    rollout_engine(recipe, version=0, shared=tmp_path / "shared")
    assert given[0]["arguments"] == further
    assert given[0]["block_size"] == 32
    assert not further.keys() & given[0].keys()


@pytest.mark.parametrize(
    ("speculate", "staleness", "device", "model", "drafts"),
    [
        ("auto", 1, "cpu", "", True),
        ("auto", 0, "cpu", "", False),
        ("auto", 1, "meta", "", False),  # as an accelerator is
        ("auto", 1, "meta", "tiny", True),
        ("on", 1, "meta", "", True),
        ("on", 1, "cpu", "tiny", True),
        ("off", 1, "cpu", "", False),
    ],
)
def test_a_recipe_says_whether_an_engine_drafts(
    speculate: str,
    staleness: int,
    device: str,
    model: str,
    drafts: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = [f"rollout.speculate={speculate}", f"pipeline.staleness={staleness}"]
    settings += [f"rollout.draft_model={model}"] if model else []
    recipe = load_recipe(ROOT / "recipes" / "tiny.toml", settings)
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "stages.engines.torch.rollout.TorchRolloutEngine",
        lambda *_, **options: given.append(options),
    )
    monkeypatch.setattr("stages.device.select", lambda name: torch.device(device))
    monkeypatch.setattr("stages.device.use", lambda device: None)
    rollout_engine(recipe, version=0)
    assert given[0]["speculate"] is drafts
    assert (given[0]["draft_model"] is not None) is bool(model)


@settings(deadline=None)
@given(
    chosen=st.lists(
        st.sampled_from(FAULTS[:31]),
        min_size=2,
        max_size=6,
        unique_by=lambda fault: fault[1].split(".")[0],
    )
)
def test_problems_are_reported_all_at_once(
    chosen: list[tuple[str, str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Faults in different sections never hide one another."""
    path = tmp_path_factory.getbasetemp() / "minimal.toml"
    path.write_text(MINIMAL)
    found = {problem.key for problem in problems(path, *(override for override, _, _ in chosen))}
    assert {key for _, key, _ in chosen} <= found


def test_relations_are_reported_beside_problems_of_other_keys(minimal: Path) -> None:
    found = problems(
        minimal,
        "train.stepz=1",
        "rollout.max_rows=2",
        "rollout.temperature=0",
        "prompts.held_out='x'",
    )
    assert {p.key for p in found} == {
        "train.stepz",
        "rollout.max_rows",
        "rollout.temperature",
        "prompts.held_out",
    }


def test_a_fault_does_not_make_others_up(minimal: Path) -> None:
    """What depends on a value that is wrong in itself is not judged."""
    assert [p.key for p in problems(minimal, "rollout.max_rows=many")] == ["rollout.max_rows"]
    assert [p.key for p in problems(minimal, "prompts.source=jsonlines")] == ["prompts.source"]


def test_the_message_lists_every_problem_on_a_line_of_its_own(minimal: Path) -> None:
    with pytest.raises(RecipeError) as raised:
        load_recipe(minimal, ["train.stepz=1", "rollout.max_rows=2"])
    lines = str(raised.value).splitlines()
    assert lines[0] == f"{minimal}: 2 problems"
    assert lines[1] == "  train.stepz = 1: is not a known key; did you mean 'steps'?"
    assert len(lines) == 3


def test_missing_sections_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    found = problems(tmp_path / "empty.toml")
    assert {p.key: p.fix for p in found} == {
        name: f"add a [{name}] section" for name in ("model", "prompts", "reward", "train")
    }


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    assert "cannot be read" in problems(tmp_path / "nowhere.toml")[0].wrong
    (tmp_path / "bad.toml").write_text("[model\nsource = 1")
    assert "is not TOML" in problems(tmp_path / "bad.toml")[0].wrong


def test_prompt_files_must_exist(minimal: Path, tmp_path: Path) -> None:
    sets = ["prompts={source='jsonl', path='%s'}"]
    missing = problems(minimal, sets[0] % (tmp_path / "no.jsonl"))
    assert [p.key for p in missing] == ["prompts.path"]
    (tmp_path / "yes.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    assert load_recipe(minimal, [sets[0] % (tmp_path / "yes.jsonl")]).prompts.path == str(
        tmp_path / "yes.jsonl"
    )


def test_a_reward_beside_the_recipe_is_found(
    minimal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_reward.py").write_text(
        "def short(completions, **_):\n    return [0.0 for _ in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    recipe = load_recipe(minimal, ["reward.functions=[{name='my_own_reward:short'}]"])
    assert recipe.reward.functions[0].name == "my_own_reward:short"
    assert (
        "no attribute 'long'"
        in problems(minimal, "reward.functions=[{name='my_own_reward:long'}]")[0].wrong
    )


def test_a_recipe_may_be_given_as_tables() -> None:
    tables = {
        "name": "tables",
        "model": {"source": "tiny"},
        "prompts": {"source": "builtin", "task": "repeat"},
        "reward": {"functions": [{"name": "spelling"}]},
        "train": {"steps": 1},
    }
    assert parse_recipe(tables).train.steps == 1
    assert "train" in tables  # left as it was


# --- keys that have gone
# --------------------------------------------------------------------------------------------------


def recorded_with(folder: Path, minimal: Path, values: dict[str, Any]) -> Path:
    """The recipe.json of a run of an earlier version, with ``values`` by dotted key."""
    data = json.loads(load_recipe(minimal).to_json())
    for key, value in values.items():
        assert override(data, key, value) is None
    path = folder / "recipe.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(("key", "retired"), RETIRED.items(), ids=list(RETIRED))
def test_a_key_that_has_gone_says_what_to_write(minimal: Path, key: str, retired: Retired) -> None:
    value = json.dumps(retired.defaults[0])
    for text in (value, "3"):
        [problem] = [
            problem for problem in problems(minimal, f"{key}={text}") if problem.key == key
        ]
        assert problem.wrong == "is no key any more"
        assert problem.fix == retired.fix


def test_a_run_of_an_earlier_version_resumes_unless_it_has_set_a_key_that_has_gone(
    minimal: Path, tmp_path: Path
) -> None:
    defaults = {key: retired.defaults[-1] for key, retired in RETIRED.items()}
    assert recorded_recipe(recorded_with(tmp_path, minimal, defaults)) == load_recipe(minimal)
    for key, retired in RETIRED.items():
        path = recorded_with(tmp_path, minimal, {**defaults, key: "another"})
        with pytest.raises(RecipeError) as raised:
            recorded_recipe(path)
        [problem] = raised.value.problems
        assert (problem.key, problem.value, problem.fix) == (key, "another", retired.fix)
        with pytest.raises(RecipeError, match=retired.fix[:20]):
            RunFolder.resume(tmp_path)


def test_a_run_of_an_earlier_version_has_the_names_of_now(minimal: Path, tmp_path: Path) -> None:
    for (key, old), new in RENAMED_VALUES.items():
        recorded = recorded_recipe(recorded_with(tmp_path, minimal, {key: old}))
        section, name = key.split(".")
        assert getattr(getattr(recorded, section), name) == new


# --- recipes that extend others
# --------------------------------------------------------------------------------------------------


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_recipe_says_what_differs_from_the_one_that_it_extends(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "mine.toml",
        'extends = "tiny"\n[train]\nsteps = 7\n[algorithm]\noptions = {kl_coef = 0.1}\n',
    )
    tiny = json.loads(load_recipe(ROOT / "recipes" / "tiny.toml").to_json())
    whole = load_recipe(path, ["seed=4"])
    tiny |= {"name": "mine", "description": "", "seed": 4}
    tiny["train"]["steps"] = 7
    tiny["algorithm"]["options"] = {"kl_coef": 0.1}
    assert json.loads(whole.to_json()) == tiny
    # A run keeps the whole recipe, so that it goes on without the files.
    kept = written(tmp_path, "recipe.json", whole.to_json())
    path.unlink()
    assert load_recipe(kept) == whole


def test_a_file_is_extended_by_its_path_beside_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "team/base.toml", 'extends = "tiny"\n[rollout]\nstop = ["a", "b"]\n')
    path = written(
        tmp_path, "mine/deep.toml", 'extends = "../team/base.toml"\n[rollout]\nstop = ["c"]\n'
    )
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(Path("mine") / "deep.toml")
    assert (recipe.name, recipe.rollout.stop, recipe.rollout.max_tokens) == ("deep", ["c"], 4)
    path.write_text('extends = "team/base.toml"\n')  # relative to the working directory
    [problem] = problems(path)
    assert (problem.key, problem.value) == ("extends", "team/base.toml")
    assert str(path.parent) in problem.fix


def test_what_cannot_be_extended_is_named(tmp_path: Path) -> None:
    def fault(text: str, path: Path = tmp_path / "mine.toml") -> tuple[str, str]:
        [problem] = problems(written(tmp_path, path.name, text))
        assert problem.key == "extends"
        return problem.wrong, problem.fix

    assert "did you mean 'tiny'?" in fault('extends = "tinny"')[1]
    assert "is no text" in fault("extends = 3")[0]
    assert "is no text" in fault('extends = ["tiny"]')[0]
    for name in ("", ".", "nowhere.toml", "x" * 5000, "a\\u0000b", "~nobody-of-that-name/a.toml"):
        fault(f'extends = "{name}"')
    assert "mine.toml → mine.toml" in fault('extends = "mine.toml"')[0]
    written(tmp_path, "other.toml", 'extends = "mine.toml"')
    assert "mine.toml → other.toml → mine.toml" in fault('extends = "other.toml"')[0]
    for index in range(MOST_EXTENDED):
        base = f"chain{index - 1}.toml" if index else "tiny"
        written(tmp_path, f"chain{index}.toml", f'extends = "{base}"')
    assert load_recipe(tmp_path / f"chain{MOST_EXTENDED - 2}.toml").train.steps == 80
    assert "in a row" in problems(tmp_path / f"chain{MOST_EXTENDED - 1}.toml")[0].wrong
    written(tmp_path, "broken.toml", "[train\n")
    [problem] = problems(written(tmp_path, "mine.toml", 'extends = "broken.toml"'))
    assert "is not TOML" in problem.wrong
    deep = ".".join(["a"] * 5000)
    written(tmp_path, "deep.toml", f"{deep} = 1")
    found = problems(written(tmp_path, "mine.toml", f'extends = "deep.toml"\n{deep} = 2'))
    assert "deep" in found[0].wrong


def test_keys_of_the_other_source_say_how_they_go(tmp_path: Path) -> None:
    """Of an extended recipe nothing can be taken out; doing as the fix says is enough."""
    written(tmp_path, "rows.jsonl", 8 * '{"prompt": "a="}\n')
    head = 'extends = "tiny"\n[prompts]\nsource = "jsonl"\npath = "rows.jsonl"\n'
    path = written(tmp_path, "mine.toml", head)
    [problem] = [each for each in problems(path) if each.key == "prompts.task"]
    assert problem.fix.endswith('write task = ""')
    path.write_text(f'{head}task = ""\n')
    assert not [each for each in problems(path) if each.key == "prompts.task"]
    written(tmp_path, "base.toml", 'extends = "tiny"\n[prompts]\nconfig = {letters = 3}\n')
    path.write_text(head.replace('"tiny"', '"base.toml"') + 'task = ""\n')
    [problem] = [each for each in problems(path) if each.key == "prompts.config"]
    assert problem.fix.endswith("--set prompts.config={}")
    found = problems(path, "prompts.config={}")
    assert not [each for each in found if each.key == "prompts.config"]


def test_what_is_extended_cannot_be_set_in_a_recipe_that_is_whole(minimal: Path) -> None:
    [problem] = problems(minimal, "extends=tiny")
    assert (problem.key, problem.fix) == ("extends", "write it at the top of the recipe's own file")
    with pytest.raises(RecipeError, match="extends"):
        change_recipe(load_recipe(minimal), ["extends=tiny"])
