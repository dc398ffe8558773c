"""Upload of an exported folder to the Hub of Hugging Face, or to the server at HF_ENDPOINT.

FOLDER ─▶ REPO, made where there is none ─▶ is it as private as asked for? ─▶ one commit ─▶ its URL
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from orchestration.publishing.export import WEIGHTS, ExportRefused

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"
# by status of the answer
FIXES = {
    401: f"the token is not valid: {LOG_IN}",
    403: "the token may not write there: make one with the right to write to this namespace",
    404: "it is not there, or the token may not see it: check the name, and the token's rights",
}
# what hf_xet says of an answer to its request for a token
XET_ANSWER = re.compile(r"\((\d{3}) [^)]*\), domain: \S+/xet-write-token/")
NO_XET = "the server has no Xet storage: HF_HUB_DISABLE_XET=1 uploads by LFS"


class PushFailed(RuntimeError):
    """The Hub has not taken a folder. The message says what to do."""


def check_push(repo: str) -> None:
    """Raise ExportRefused where ``repo`` is no name, or there is no token."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ExportRefused(f"--push: {error}; write NAMESPACE/NAME") from None
    if get_token() is None:
        raise ExportRefused(f"--push: {repo} needs a token; {LOG_IN}")


def publish(folder: Path, repo: str, message: str, *, private: bool) -> str:
    """Upload ``folder`` to ``repo`` in place of the weights there, and return the URL of the
    commit. ``private``: a new repository is, and an existing one must be. Raises PushFailed."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(library_name="asyncdock")
    try:
        repo = api.create_repo(repo, private=private or None, exist_ok=True).repo_id
        if private and not api.model_info(repo).private:
            raise PushFailed(
                f"--private: {repo} is there, and public; make it private in its settings, or "
                f"give another name"
            )
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message=message,
            # of another layout, they would be loaded in place of the new ones
            delete_patterns=[*WEIGHTS, "adapter_config.json"],
        )
    except PushFailed:
        raise
    except Exception as error:  # each layer of the library has errors of its own
        cause = error.__cause__ or error
        status = getattr(getattr(cause, "response", None), "status_code", 0)
        fix = FIXES.get(status, "it may pass: try again later")
        if answer := XET_ANSWER.search(str(error)):
            status = int(answer[1])
            fix = NO_XET if status == 404 else FIXES.get(status, fix)
        reason = getattr(cause, "server_message", None) or str(cause).partition("\n")[0]
        again = f"hf upload {repo} {folder}{' --private' if private else ''}"
        raise PushFailed(
            f"--push: {repo} does not have the model: {reason or repr(cause)}; "
            f"{fix}. {folder} is whole, and `{again}` uploads it"
        ) from error
    return str(commit.commit_url)
