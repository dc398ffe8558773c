"""Files inside of a folder below a root that lie elsewhere: no run reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from api.server.access.roots import MOST_ENTRIES, leads_out
from api.server.access.settings import Settings
from api.server.access.submission_policy import accept
from orchestration.recipe.problems import RecipeError
from stages.model.load import tiny_model, tiny_tokenizer
from tests.orchestration.runs import TINY


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model below a root, beside which there is a place that nobody may read by it."""
    folder = tmp_path / "root" / "model"
    tiny_model(0).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    return folder


def link(path: Path, target: Path | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def link_to_link(model: Path) -> None:
    link(model.parent / "first", "../outside/secret")
    link(model / "vocab.txt", "../first")


def folder_link(model: Path) -> None:
    link(model / "additional_chat_templates", model.parents[1] / "outside")


def inside_of_linked(model: Path) -> None:
    """The folder that is linked is below the root; what is in it is not."""
    link(model.parent / "other" / "x.jinja", "../../outside/secret")
    link(model / "additional_chat_templates", "../other")


OUT: dict[str, Callable[[Path], None]] = {
    "a file": lambda model: link(
        model / "chat_template.jinja", model.parents[1] / "outside" / "secret"
    ),
    "a file in a subfolder": lambda model: link(model / "a" / "b" / "c", "/etc/passwd"),
    "a link to a link": link_to_link,
    "a folder": folder_link,
    "a link in a linked folder": inside_of_linked,
    "out and back": lambda model: link(
        model / "x", "../../outside/../../../../../../../../../../../etc/passwd"
    ),
    "a relative one by the root's name": lambda model: link(model / "x", "../../root-twin"),
    "nothing, elsewhere": lambda model: link(model / "x", "/nothing/is/here"),
    "a device": lambda model: link(model / "model.safetensors.index.json", "/dev/zero"),
    "the process's files": lambda model: link(model / "x", "/proc/self/environ"),
    "a pipe": lambda model: os.mkfifo(model / "vocab.json"),
}


@pytest.mark.parametrize("how", OUT)
@pytest.mark.parametrize("key", ["model.source", "prompts.path"])
def test_what_leads_out_is_refused(model: Path, how: str, key: str) -> None:
    OUT[how](model)
    data = json.loads(json.dumps(TINY))
    if key == "model.source":
        data["model"] = {"source": "model"}
    else:
        data["prompts"] = {"source": "datasets", "path": str(model), "max_prompt_tokens": 16}
    with pytest.raises(RecipeError) as refused:
        accept(Settings(data=model.parents[1], roots=(model.parent,)), data, {})
    (problem,) = [problem for problem in refused.value.problems if problem.key == key]
    assert "holds what this server does not read: " in problem.wrong
    assert "outside/secret" not in problem.wrong, "where it leads is not told"


def test_links_that_stay_below_the_root_are_followed(model: Path) -> None:
    blobs = model.parent / "blobs"
    blobs.mkdir()
    (model / "config.json").rename(blobs / "1")
    link(model / "config.json", "../blobs/1")
    link(model / "again", "../model")
    link(model / "itself", "itself")
    assert leads_out((model.parent,), model, model.parents[1]) == ""
    assert leads_out((blobs, model), model, model.parents[1]) == "", "several roots"
    assert "is a link to a place outside" in leads_out((model,), model, model.parents[1])


def test_a_folder_of_very_many_files_is_not_walked_for_long(tmp_path: Path) -> None:
    for number in range(MOST_ENTRIES + 1):
        (tmp_path / str(number)).touch()
    assert leads_out((tmp_path,), tmp_path, tmp_path / "data") == (
        f"it has more than {MOST_ENTRIES} files"
    )


def test_what_is_the_services_own_is_read_by_no_run(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator's root may hold the service's folder, with its token and the passwords of
    indexes."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    data = tmp_path / "service"
    own = (
        data / "authorization",
        data / "index" / "appendonlydir" / "a.aof",
        data / "runs" / "one" / "index.json",
        tmp_path / "state" / "asyncdock" / "services" / "of-one-address",
    )
    for path in (*own, data / "runs" / "one" / "checkpoints" / "prompts.jsonl"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("secret")
    (model / "vocab.txt").symlink_to(own[0])
    settings = Settings(data=data, roots=(tmp_path,))
    for path in (*own, data, data / "runs", model, tmp_path / "state"):
        source = {"source": "jsonl", "path": str(path), "max_prompt_tokens": 16}
        with pytest.raises(RecipeError) as refused:
            accept(settings, {**TINY, "prompts": source}, {})
        (problem,) = [
            problem for problem in refused.value.problems if problem.key == "prompts.path"
        ]
        assert problem.wrong.startswith("holds what this server does not read: "), path
        assert "the service's own" in problem.wrong, path
    assert leads_out(settings.roots, data / "runs" / "one" / "checkpoints", data) == ""
