"""Whether a name that is no folder is a model of the Hugging Face hub. It is asked once: a typo is answered at once."""

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError

from ..errors import UserError

_SECONDS = 5  # for the one request


def hub_options(name: str) -> dict[str, bool]:
    """The arguments of from_pretrained() with which a model of the hub loads without waiting for a hub out of reach.

    Args:
        name: an id such as "org/model".

    Raises:
        UserError: the hub has no such model or keeps it from this user; or it cannot be asked, and the model was never
            downloaded.
    """
    try:
        downloaded = isinstance(try_to_load_from_cache(name, "config.json"), str)
        if not constants.HF_HUB_OFFLINE:
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_SECONDS)
            return {}
        reason = "HF_HUB_OFFLINE is set"
    except HFValidationError:
        raise UserError(
            f"model {name!r}: no such folder, and the name cannot be an id of the Hugging Face hub"
        ) from None
    except GatedRepoError:
        raise UserError(
            f"model {name!r}: its owner asks for an agreement; accept it on the model's page, then run: hf auth login"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"model {name!r}: no such folder, and the Hugging Face hub has no such model; check the name (for a "
            f"private model, run: hf auth login)"
        ) from None
    except EntryNotFoundError:
        raise UserError(
            f"model {name!r}: its repository has no config.json, so it is not a Hugging Face model"
        ) from None
    except Exception as error:  # the HTTP libraries share no base class
        reason = " ".join(str(error).split())[:200] or type(error).__name__
    if downloaded:
        return {"local_files_only": True}
    raise UserError(
        f"model {name!r}: no such folder, and the Hugging Face hub cannot be asked ({reason}); check the name, or the "
        f"network"
    )
