"""A pruned model on the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import inspect
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError, one_line, show
from ..progress import begin_stage
from ..terminal import is_terminal

# weights of an earlier upload under other names, which would be loaded in place of the new ones
_STALE = ["*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json"]


def open_repository(name: str) -> str:
    """Makes sure that a model can be uploaded under a name: makes the repository if there is none, as a private one.

    Args:
        name: NAME, which belongs to the user of the token, or OWNER/NAME.

    Returns:
        OWNER/NAME.

    Raises:
        UserError: the name is not allowed, there is no token, it may not write there, or the Hub does not answer.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--push-to-hub must be NAME or OWNER/NAME, got {show(name)}: {one_line(error)}") from error
    if not get_token():
        raise UserError("--push-to-hub needs a token of the Hugging Face Hub: run `hf auth login`, or set HF_TOKEN")
    with _hub_errors(f"--push-to-hub {name}"):
        api = HfApi()
        found = api.create_repo(name, private=True, exist_ok=True).repo_id
        if "write" in inspect.signature(api.auth_check).parameters:  # older versions cannot ask
            api.auth_check(found, write=True)
    return found


def upload(folder: str | Path, name: str) -> str:
    """Uploads a saved model; weights that the repository held before are replaced.

    Args:
        folder: of save_pruned().
        name: as open_repository().

    Returns:
        The address of the model.

    Raises:
        UserError: as open_repository(), or the upload fails. The folder stays as it is.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    later = f"{folder} is complete; upload it by the same command with --resume, or by hf upload {name} "
    later += shlex.quote(str(folder))
    begin_stage("upload")
    if not is_terminal(sys.stderr):
        disable_progress_bars()
    try:
        name = open_repository(name)
        with _hub_errors(f"the upload to {name} failed"):
            HfApi().upload_folder(
                repo_id=name, folder_path=folder, delete_patterns=_STALE, commit_message="Upload the pruned model"
            )
    except UserError as error:
        raise UserError(f"{error}; {later}") from error
    except KeyboardInterrupt as interrupt:
        interrupt.args = (later,)
        raise
    return f"{HfApi().endpoint}/{name}"


@contextlib.contextmanager
def _hub_errors(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of the network, the Hub, the proxy and the upload
        raise UserError(f"{what}: {one_line(error)}") from error
