"""Looks up a model on the Hugging Face hub by one short request, so that a typo is answered at once."""

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

from ..errors import UserError, did_you_mean, one_line

_CONFIG = "config.json"
_OWN_NAMES = ("smollm2",)
_SECONDS = 5  # for the one request


def hub_options(name: str) -> dict[str, bool]:
    """Options of from_pretrained() for a model of the hub. If the hub cannot be asked, only the local copy is read.

    Args:
        name: an id such as "org/model".

    Raises:
        UserError: the hub has no such model; or it cannot be asked, and the model was never downloaded.
    """
    try:
        downloaded = isinstance(try_to_load_from_cache(name, _CONFIG), str)
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _ask(name)
    except HFValidationError:
        raise UserError(
            f"model {name!r}: no such folder, and the name cannot be an id of the Hugging Face hub"
        ) from None
    if reason is None:
        return {}
    if downloaded:
        return {"local_files_only": True}
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
