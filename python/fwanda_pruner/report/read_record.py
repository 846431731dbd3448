"""Checks of a record that was read from a file: every value has the type and the range that a run writes."""

from __future__ import annotations

import math

from ..errors import UserError, show

_KINDS = {
    "config": dict,
    "matrices": list,
    "block_parameters": int,
    "model_parameters": int,
    "model_zeros": int,
    "perplexity": list,
    "seconds": dict,
    "peak_memory_bytes": int,
    "energy": (int, float, str),
    "energy_details": dict,
    "versions": dict,
    "tokens_sha256": (str, type(None)),
    "bos": (bool, type(None)),
    "warnings": list,
    "omega_floored_rows": (int, type(None)),
    "domains": list,
    "passes": (dict, type(None)),
}
_PERPLEXITY_KINDS = {
    "source": str,
    "dense": (int, float, str),
    "pruned": (int, float, str),
    "seqlen": int,
    "windows": int,
    "tokens_sha256": str,
    "bos": (bool, type(None)),
    "tokenizer": (str, type(None)),
}
_DOMAIN_KINDS = {
    "source": str,
    "calibrated": bool,
    "unread": bool,
    "windows": int,
    "dense": (int, float, type(None)),
    "wanda": (int, float, type(None)),
    "pruned": (int, float, type(None)),
}
_ENERGY_KINDS = {
    "gross_joules": (int, float),
    "net_joules": (int, float, type(None)),
    "flag": (str, type(None)),
}
_ROW_KINDS = {
    "name": str,
    "asked": int,
    "kept": int,
    "kept_zero": int,
    "skipped": (str, type(None)),
    "tensor": (str, type(None)),
    "index": (int, type(None)),
}


def facts_of(data: dict, *, row_bins: int) -> dict:
    """The checked values of a record, by the names of the fields of Report; `matrices` as the fields of MatrixRow.

    Args:
        data: what Report.to_dict() gave. Keys that are no fields are ignored.
        row_bins: number of bins that `row_histogram` must have.

    Raises:
        UserError: a key is missing, or holds a value that no report has.
    """
    facts = {key: _get(data, key, kinds) for key, kinds in _KINDS.items()}
    _check_values("seconds", facts["seconds"], (int, float))
    _check_config(facts["config"])
    _check_energy(facts["energy_details"])
    _check_values("versions", facts["versions"], (str, type(None)))
    _check_values("warnings", dict(enumerate(facts["warnings"])), str)
    facts["backends"] = _backends(data.get("backends"))
    facts["engine"] = _get({"engine": "resident", **data}, "engine", str)  # older records lack these and the next
    facts["ranks"] = _get({"ranks": 1, **data}, "ranks", int)
    for key in ("segment", "bytes_loaded"):  # of the streamed engine
        facts[key] = _get({key: None, **data}, key, (int, type(None)))
    facts["refit"] = _refit(data.get("refit"))
    facts["domains"] = [_domain(domain, i) for i, domain in enumerate(facts["domains"])]
    facts["row_histogram"] = _row_histogram(data.get("row_histogram"), row_bins)
    facts["matrices"] = [_matrix_row(row, i) for i, row in enumerate(facts["matrices"])]
    facts["perplexity"] = [_perplexity(text, i) for i, text in enumerate(facts["perplexity"])]
    return facts


def _get(data: dict, key: str, kinds, where: str = ""):
    if not isinstance(data, dict) or key not in data:
        raise UserError(f"key {where + key!r} is missing; the file is not a complete report")
    value = data[key]
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    fits = isinstance(value, kinds) and (bool in allowed or not isinstance(value, bool))
    if not fits or (isinstance(value, int) and not 0 <= value < 2**63):
        raise UserError(f"key {where + key!r} holds {show(value)}, which no report has there")
    return value


def _matrix_row(data: dict, index: int) -> dict:
    where = f"matrices[{index}]."
    shape = _get(data, "shape", list, where)
    sizes = len(shape) <= 8 and all(isinstance(size, int) and size >= 0 for size in shape)
    if not sizes or math.prod(shape) >= 2**63:
        raise UserError(f"key {where + 'shape'!r} holds {show(shape)}, expected a list of sizes")
    facts = {key: _get(data, key, kinds, where) for key, kinds in _ROW_KINDS.items()}
    disagreement = data.get("wanda_disagreement")
    if disagreement is not None and not (type(disagreement) in (int, float) and 0 <= disagreement <= 1):
        raise UserError(
            f"key {where + 'wanda_disagreement'!r} holds {show(disagreement)}, expected a number in [0, 1] or null"
        )
    before = None if data.get("zeros_before") is None else _get(data, "zeros_before", int, where)
    return {"shape": tuple(shape), "wanda_disagreement": disagreement, "zeros_before": before, **facts}


def _domain(data: dict, index: int) -> dict:
    where = f"domains[{index}]."
    facts = {key: _get(data, key, kinds, where) for key, kinds in _DOMAIN_KINDS.items()}
    for key in ("dense", "wanda", "pruned"):
        if not (facts[key] is None or math.isfinite(facts[key])):
            raise UserError(f"key {where + key!r} holds {show(facts[key])}, expected a number or null")
    return facts


def _check_config(config: dict) -> None:
    """Refuses settings, or a result of the search, that no run writes."""
    for key in ("model", "method", "allocation", "pattern"):
        if not isinstance(config.get(key), (str, type(None))):
            raise UserError(f"key {'config.' + key!r} holds {show(config[key])}, expected a text or null")
    chosen = config.get("chosen")
    if chosen is None:
        return
    for key, kind in (("name", str), ("start", str), ("losses", dict)):
        _get(chosen, key, kind, "config.chosen.")
    for name, losses in chosen["losses"].items():
        where = f"config.chosen.losses.{name}"
        if not isinstance(losses, dict):
            raise UserError(f"key {show(where)} holds {show(losses)}, expected the losses of domains")
        _check_values(where, losses, (int, float))


def _check_energy(details: dict) -> None:
    """Refuses energies of another form than EnergyMeter.to_dict(); what is missing was not measured."""
    phases = _get({"phases": {}, **details}, "phases", dict, "energy_details.")
    values = {"total": details["total"]} if "total" in details else {}
    for name, value in {**values, **{f"phases.{name}": value for name, value in phases.items()}}.items():
        where = f"energy_details.{name}"
        if isinstance(value, str):
            continue
        for key, kinds in _ENERGY_KINDS.items():
            _check_values(where, {key: _get(value, key, kinds, f"{where}.")}, kinds)


def _check_values(where: str, values: dict, kinds) -> None:
    """Refuses a mapping whose values are of other types, or numbers that no report holds."""
    for key, value in values.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18
        if isinstance(value, bool) or not isinstance(value, kinds) or (isinstance(value, (int, float)) and not number):
            raise UserError(f"key {f'{where}.{key}'[:120]!r} holds {show(value)}, which no report has there")


def _backends(data) -> dict[str, str] | None:
    if data is None:
        return None
    if not isinstance(data, dict):
        raise UserError(f"key 'backends' holds {show(data)}, expected the backend of each op or null")
    _check_values("backends", data, str)
    return data


def _refit(data) -> dict | None:
    if data is None:
        return None
    facts = {key: _get(data, key, int, "refit.") for key in ("blocks", "kept")}
    if facts["kept"] > facts["blocks"]:
        raise UserError(f"key 'refit.kept' holds {show(facts['kept'])}, expected at most the number of blocks")
    return facts


def _row_histogram(counts, bins: int) -> list[int] | None:
    if counts is None:
        return None
    valid = isinstance(counts, list) and len(counts) == bins
    if not valid or not all(type(count) is int and 0 <= count < 2**63 for count in counts):
        raise UserError(f"key 'row_histogram' holds {show(counts)}, expected {bins} counts of rows or null")
    return counts


def _perplexity(data: dict, index: int) -> dict:
    where = f"perplexity[{index}]."
    facts = {key: _get(data, key, kinds, where) for key, kinds in _PERPLEXITY_KINDS.items()}
    for key in ("dense", "pruned"):
        try:
            facts[key] = float(facts[key])
        except (ValueError, OverflowError):
            raise UserError(f"key {where + key!r} holds {show(facts[key])}, expected a number") from None
    return facts
