"""Token ids that are given in Python as tensors of any kind: read, or refused in one line."""

import warnings

import pytest
import tiny
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fwanda_pruner import UserError, collect, evaluate_model, prune
from fwanda_pruner.report.summary import protocol_line

IDS = tiny.tokens(16, 24)
DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64]


def freed() -> torch.Tensor:
    ids = IDS.clone()
    ids.untyped_storage().resize_(0)
    return ids


UNREADABLE = {
    "meta": (lambda: IDS.to("meta"), "got a tensor on the meta device, which holds no numbers"),
    "0-d on meta": (lambda: torch.tensor(3, device="meta"), "got a tensor on the meta device, which holds no numbers"),
    "sparse": (IDS.to_sparse, "got a torch.sparse_coo tensor"),
    "sparse rows": (IDS.to_sparse_csr, "got a torch.sparse_csr tensor"),
    "nested": (lambda: torch.nested.nested_tensor([IDS[0], IDS[1, :9]]), "got a nested tensor"),
    "jagged": (lambda: torch.nested.nested_tensor([IDS[0], IDS[1, :9]], layout=torch.jagged), "got a NestedTensor"),
    "quantised": (lambda: torch.quantize_per_tensor(IDS.float(), 1.0, 0, torch.quint8), "got a quantised tensor"),
    "fake": (lambda: FakeTensorMode().from_tensor(IDS), "got a FakeTensor"),
    "freed": (freed, "got a tensor whose memory is freed"),
}
SHAPES = {"0-d": torch.tensor(3), "one window": IDS[0], "three dimensions": IDS[None]}


def read(call, argument: str, ids):
    given = {"progress": False, argument: ids}
    if call is not evaluate_model:
        given.setdefault("calibration", ["self"] if argument == "own" else IDS)
        given |= {} if argument == "calibration" else {"nsamples": 16, "seqlen": 24}
    return call(tiny.llama(), tiny.tokenizer(), **given)


CALLS = [
    (prune, "calibration"), (prune, "eval"), (collect, "calibration"), (collect, "own"), (evaluate_model, "eval"),
]  # fmt: skip


@pytest.mark.fault("odd calls")
def test_a_head_that_is_smaller_than_the_embedding_sets_the_largest_token():
    model = tiny.llama(tie_word_embeddings=False)
    model.lm_head = torch.nn.Linear(32, 40, bias=False)
    for call in (
        lambda: prune(model, method="wanda", calibration=IDS, progress=False),
        lambda: prune(model, method="sparsegpt", calibration=IDS, progress=False),
        lambda: evaluate_model(model, eval=IDS, progress=False),
    ):
        with pytest.raises(UserError, match=r"token ids must be in \[0, 40\), got 3 to"):
            call()


@pytest.mark.fault("odd calls")
@pytest.mark.parametrize("call, argument", CALLS)
@pytest.mark.parametrize("kind", UNREADABLE)
def test_tensors_without_numbers_to_read_are_one_line(kind, call, argument):
    make, got = UNREADABLE[kind]
    with pytest.raises(UserError) as error:
        read(call, argument, make())
    assert str(error.value) == f"{argument} as token ids must be a plain tensor, {got}; make one by torch.tensor(ids)"


@pytest.mark.fault("odd calls")
@pytest.mark.parametrize("call, argument", CALLS)
@pytest.mark.parametrize("shape", SHAPES)
def test_other_shapes_are_one_line_in_a_list_too(shape, call, argument):
    for ids in (SHAPES[shape], [SHAPES[shape]]) if argument == "eval" else (SHAPES[shape],):
        with pytest.raises(UserError, match=rf"^{argument} as token ids must be \[S, L\], got \["):
            read(call, argument, ids)


@pytest.mark.fault("odd calls")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_of_any_dtype_are_read(dtype):
    expected = evaluate_model(tiny.llama(), eval=IDS, progress=False)
    assert evaluate_model(tiny.llama(), eval=IDS.to(dtype), progress=False) == expected
    fisher = {"calibration": IDS.to(dtype), "progress": False}
    assert (
        collect(tiny.llama(), **fisher).fingerprint()
        == collect(tiny.llama(), calibration=IDS, progress=False).fingerprint()
    )


@pytest.mark.fault("odd calls")
@pytest.mark.parametrize("ids, got", [(IDS[:, :9], r"\[16, 9\] int64"), (IDS.float(), r"\[16, 24\] float32")], ids=str)
def test_own_text_of_another_length_or_dtype_is_one_line(ids, got):
    with pytest.raises(UserError, match=rf"tokens must be integer \[S, seqlen\] = \[S >= 1, 24\], got {got}"):
        read(collect, "own", ids)


@pytest.mark.fault("unused setting")
@pytest.mark.parametrize("bos", ["window", "none"])
def test_of_token_ids_no_record_says_that_bos_was_added_or_left_out(bos):
    ids, expected = {"calibration": IDS, "bos": bos, "progress": False}, f"^--bos {bos} has no effect: token ids are"
    with pytest.warns(UserWarning, match=expected):
        report = prune(tiny.llama(), method="wanda", eval=IDS, **ids)
    with pytest.warns(UserWarning, match=expected):
        statistics = collect(tiny.llama(), **ids)
    with pytest.warns(UserWarning, match=expected):
        found = evaluate_model(tiny.llama(), eval=IDS, bos=bos, progress=False)
    assert report.bos is report.perplexity[0]["bos"] is statistics.bos is found["perplexity"][0]["bos"] is None
    assert any("--bos" in text for text in report.warnings)
    assert "BOS as in the token ids" in protocol_line(report.perplexity[0])


def test_beside_token_ids_a_text_by_name_has_the_bos_that_was_asked(tmp_path):
    text = str(tiny.text_file(tmp_path))
    given = {"method": "wanda", "bos": "window", "guard": "none", "progress": False}
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        report = prune(tiny.llama(), tiny.tokenizer(), calibration=IDS, eval=[text, IDS], **given)
        statistics = collect(tiny.llama(), tiny.tokenizer(), calibration=text, nsamples=16, seqlen=24, bos="window")
    assert not any("--bos" in str(entry.message) for entry in shown)
    assert [entry["bos"] for entry in report.perplexity] == [True, None] and report.bos is statistics.bos is True


@pytest.mark.fault("negated view")
@pytest.mark.parametrize("call, argument", CALLS)
def test_negated_views_are_read_as_their_values(call, argument):
    def of(ids):
        found = read(call, argument, ids)
        return found if call is evaluate_model else found.tokens_sha256

    assert of(torch._neg_view(-IDS)) == of(IDS)


@pytest.mark.fault("odd calls")
@pytest.mark.parametrize("call, argument", CALLS)
@pytest.mark.parametrize("shape", [(0, 24), (16, 1), (16, 0)])
def test_windows_without_a_token_to_predict_are_refused_by_the_name_of_the_argument(shape, call, argument):
    with pytest.raises(UserError) as error:
        read(call, argument, IDS.new_zeros(shape))
    assert str(error.value) == f"{argument} as token ids must be [S, L] with S >= 1 and L >= 2, got {list(shape)}"
