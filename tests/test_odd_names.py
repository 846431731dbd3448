"""Names, mappings and lists of the kernel package that are something else: one line that says what was got."""

import numpy as np
import pytest
import torch

import fwanda_kernels as fk

VALUES = {
    "tensor": torch.rand(3, 3),
    "tensor without dimensions": torch.tensor(1),
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.zeros(2, 2, device="meta"),
    "array": np.zeros((3, 3)),
    "array without dimensions": np.array(0.5),
    "record": np.zeros(1, dtype=[("a", int)])[0],
    "no time": np.timedelta64("NaT"),
    "list": [["nm_mask"]],
    "lines": "nm_mask\nreference",
    "long": "x" * 10_000,
    "nothing": object(),
}
WEIGHT, SCALE, LINEAR = torch.ones(2, 4), torch.ones(4), torch.nn.Linear(4, 2)


def enter(block) -> None:
    with block:
        pass


CALLS = {
    "explain: op must be one of ": fk.explain,
    "backend must be one of native, triton, reference, got ": lambda value: enter(fk.use_backend(value)),
    "bad_message: code must be an integer, got ": lambda value: fk.bad_message("op", value),
    "PackedHeader: shape must be (R, C)": lambda value: fk.PackedHeader(value, torch.float32, ""),
    "PackedHeader: dtype must be one of ": lambda value: fk.PackedHeader((2, 4), value, ""),
    "collect_statistics: initial": lambda value: fk.collect_statistics({"a": LINEAR}, value),
    "collect_statistics: initial['a'] must be a LayerStatistics, got ": lambda value: fk.collect_statistics(
        {"a": LINEAR}, {"a": value}
    ),
    "collect_hessians: token_weight": lambda value: enter(fk.collect_hessians({"a": LINEAR}, value)),
    "obs_prune_: pattern must be ": lambda value: fk.obs_prune_(WEIGHT.clone(), torch.eye(4), pattern=value),
    "obs_factor: damping must be ": lambda value: fk.obs_factor(torch.eye(4), value),
}


@pytest.mark.fault("not a tensor")
@pytest.mark.parametrize("message", CALLS)
@pytest.mark.parametrize("kind", VALUES)
def test_what_is_no_name_no_mapping_and_no_number_is_one_line(kind, message):
    with pytest.raises(ValueError) as error:
        CALLS[message](VALUES[kind])
    text = str(error.value)
    assert text.startswith(message) and "\n" not in text and len(text) < 500


@pytest.mark.fault("not a tensor")
@pytest.mark.parametrize("value", [torch.tensor(1), np.array(1), np.ma.masked], ids=["tensor", "array", "masked"])
def test_lists_without_a_length_are_one_line(value):
    for call, name in (
        (lambda: fk.allocate_budgets(value, [2], k_max=[4]), "allocate_budgets: vs"),
        (lambda: fk.foreach_accumulate_sq_sums_([SCALE.clone()], value), "foreach_accumulate_sq_sums_: xs"),
        (lambda: fk.global_row_scales(value, [SCALE], [SCALE]), "global_row_scales: weights"),
        (lambda: fk.select_threshold([WEIGHT], value, [SCALE], 4), "select_threshold: row_scales"),
    ):
        with pytest.raises(ValueError, match=f"^{name} must be a list, got ") as error:
            call()
        assert "\n" not in str(error.value)
