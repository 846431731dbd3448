"""Looks up a model on the Hugging Face hub by one short request, so that a typo is answered at once."""

from pathlib import Path

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

from ..errors import UserError, did_you_mean, one_line

_CONFIG = "config.json"
_OWN_NAMES = ("smollm2",)
_SECONDS = 5  # for the one request


def reachable(name: str) -> str:
    """What from_pretrained() reads for a model of the hub: its id, or if the hub cannot be asked, the local copy.

    Args:
        name: an id such as "org/model".

    Returns:
        The id, or the folder of the local copy.

    Raises:
        UserError: the hub has no such model; or it cannot be asked, and the model was never downloaded.
    """
    try:
        downloaded = try_to_load_from_cache(name, _CONFIG)
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _ask(name)
    except HFValidationError:
        raise UserError(
            f"model {name!r}: no such folder, and the name cannot be an id of the Hugging Face hub"
        ) from None
    if reason is None:
        return name
    if isinstance(downloaded, str):
        return str(Path(downloaded).parent)
    raise UserError(
        f"model {name!r}: no such folder, and the Hugging Face hub cannot be asked ({reason}); check the name, or the "
        f"network{did_you_mean(name, _OWN_NAMES)}"
    )


def _ask(name: str) -> str | None:
    """Why the hub cannot be asked; None if it has the model.

    Raises:
        UserError: it has no such model.
    """
    try:
        files = HfApi().model_info(name, timeout=_SECONDS).siblings
    except RepositoryNotFoundError:
        raise UserError(
            f"model {name!r}: no such folder, and the Hugging Face hub has no such model; check the name (for a "
            f"private model, run: hf auth login){did_you_mean(name, _OWN_NAMES)}"
        ) from None
    except HFValidationError:
        raise
    except Exception as error:  # the HTTP libraries share no base class
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
            return None  # a mirror need not know this request; the download says what is wrong
        return one_line(error, 200)
    if files and all(file.rfilename != _CONFIG for file in files):
        raise UserError(f"model {name!r}: its repository has no {_CONFIG}, so it is not a Hugging Face model")
    return None
