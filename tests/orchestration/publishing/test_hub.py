"""Uploads to a server that speaks the Hub's API: what is there afterwards, and what is said when it
refuses."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from orchestration.publishing.export import ExportRefused
from orchestration.publishing.hub import check_push
from tests import hub as hubs
from tests.hub import Hub, Repository
from tests.sources import ROOT

# One process for all: the library reads HF_ENDPOINT when it is imported.
PUBLISH = """
import json, sys
from pathlib import Path
from orchestration.publishing.hub import PushFailed, publish
said = {}
for name, private in json.loads(sys.argv[2]):
    try:
        said[name] = publish(Path(sys.argv[1]), name, "Step 4 of letters", private=private)
    except PushFailed as failed:
        said[name] = f"failed: {failed}"
print(json.dumps(said))
"""
FILES = {"README.md": b"---\ntags: []\n---\n", "model.safetensors": bytes(range(256))}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with hubs.serving() as hub:
        yield hub


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def said(hub: Hub, folder: Path) -> dict[str, str]:
    """What is said of the upload to each repository."""
    older = {
        "README.md": b"older",
        "notes.txt": b"by hand",
        "adapter_config.json": b"{}",
        "model-00001-of-00002.safetensors": b"older",
        "model.safetensors.index.json": b"{}",
    }
    hub.repositories |= {
        "ann/used": Repository(private=False, files=older),
        "ann/public": Repository(private=False),
    }
    hub.faults = {
        ("create", "ann/unknown"): 401,
        ("create", "other/letters"): 403,
        ("upload", "ann/large"): 400,
        ("commit", "ann/down"): 503,
        ("commit", "ann/gone"): "gone",
    }
    hub.requests.clear()
    names = ["ann/new", "letters", "ann/used", *(name for _, name in hub.faults)]
    uploads = [("ann/private", True), ("ann/public", True), *((name, False) for name in names)]
    said = published(hub, folder, uploads, HF_HUB_DISABLE_XET="1")
    assert not [path for path in hub.requests if "xet" in path]
    return said


def published(
    hub: Hub, folder: Path, uploads: Sequence[tuple[str, bool]], **settings: str
) -> dict[str, str]:
    """Upload ``folder`` to repositories, private or not; returns what is said of each."""
    done = subprocess.run(
        [sys.executable, "-c", PUBLISH, str(folder), json.dumps(uploads)],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "PYTHONPATH": str(ROOT),
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": hubs.TOKEN,
            **settings,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Upload" not in done.stderr, "progress is for terminals"
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(("name", "private"), [("ann/new", False), ("ann/private", True)])
def test_a_new_repository_has_the_files_in_one_commit(
    name: str, private: bool, hub: Hub, said: dict[str, str]
) -> None:
    repository = hub.repositories[name]
    assert (repository.private, repository.files) == (private, FILES)
    assert repository.commits == ["Step 4 of letters"]
    assert said[name].startswith(f"{hub.url}/{name}/commit/")


def test_a_name_alone_is_in_the_namespace_of_the_token(hub: Hub, said: dict[str, str]) -> None:
    assert hub.repositories["ann/letters"].files == FILES
    assert said["letters"].startswith(f"{hub.url}/ann/letters/commit/")


def test_weights_of_another_layout_are_replaced_and_other_files_stay(
    hub: Hub, said: dict[str, str]
) -> None:
    assert hub.repositories["ann/used"].files == {**FILES, "notes.txt": b"by hand"}


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("ann/unknown", "the token is not valid: log in with `hf auth login`, or set HF_TOKEN"),
        ("other/letters", "the token may not write there: make one with the right to write"),
        ("ann/large", "as asked"),
        ("ann/down", "it may pass: try again later"),
        ("ann/gone", "Server disconnected"),
    ],
)
def test_a_refused_upload_says_what_to_do_and_leaves_nothing_half(
    name: str, fix: str, hub: Hub, folder: Path, said: dict[str, str]
) -> None:
    assert said[name].startswith(f"failed: --push: {name} does not have the model: ")
    assert fix in said[name]
    assert f"{folder} is whole, and `hf upload {name} {folder}` uploads it" in said[name]
    assert name not in hub.repositories or not hub.repositories[name].files


def test_a_public_repository_is_not_taken_for_a_private_one(hub: Hub, said: dict[str, str]) -> None:
    assert hub.repositories["ann/public"].files == {}
    assert "--private: ann/public is there, and public; make it private" in said["ann/public"]


def test_weights_go_to_xet_where_its_library_is(folder: Path, tmp_path: Path) -> None:
    """Its library decides, and asks the server for a token alone. A folder stands for its server:
    the library writes there the chunks that it would send."""
    pytest.importorskip("hf_xet")
    storage = tmp_path / "xet"
    storage.mkdir()
    uploads = [("ann/xet", False), ("ann/denied", False)]
    with hubs.serving() as hub:
        hub.xet = storage
        hub.faults = {("token", "ann/denied"): 403}
        said = published(hub, folder, uploads, HF_HOME=str(tmp_path))
        hub.xet = None
        said |= published(hub, folder, [("ann/without", False)], HF_HOME=str(tmp_path))
    assert said["ann/xet"].startswith(f"{hub.url}/ann/xet/commit/")
    weights = FILES["model.safetensors"]
    digest = hashlib.sha256(weights).hexdigest().encode()
    assert hub.repositories["ann/xet"].files == FILES | {"model.safetensors": digest}
    assert any(weights in path.read_bytes() for path in storage.rglob("*") if path.is_file())
    assert not hub.objects, "nothing goes by LFS"
    assert "the token may not write there" in said["ann/denied"]
    assert "no Xet storage: HF_HUB_DISABLE_XET=1 uploads by LFS. " in said["ann/without"]
    assert not hub.repositories["ann/without"].files


def test_a_push_without_a_token_is_refused_before_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "absent"))
    with pytest.raises(ExportRefused, match="ann/letters needs a token; log in with `hf auth"):
        check_push("ann/letters")
    monkeypatch.setenv("HF_TOKEN", "hf_any")
    check_push("ann/letters")
