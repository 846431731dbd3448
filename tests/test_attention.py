"""Attention kernels on Hopper, and windows that are single sequences."""

import threading

import pytest
import tiny
import torch
from measuring import measure
from torch.nn.attention import SDPBackend
from transformers import masking_utils

from fwanda_pruner.engine import attention
from fwanda_pruner.engine.attention import fast_attention, single_sequences

PACKED = torch.arange(8)[None] % 4  # positions of two sequences in one window


@pytest.mark.parametrize(
    ("capability", "heads", "deterministic", "first"),
    [((9, 0), 1, False, True), ((8, 0), 1, False, False), ((9, 0), 4, False, False), ((9, 0), 1, True, False)],
)
def test_hopper_takes_cudnn_s_attention_first(capability, heads, deterministic, first, monkeypatch):
    model = tiny.llama(hidden_size=64, num_attention_heads=heads, num_key_value_heads=heads, head_dim=64 // heads)
    monkeypatch.setattr(attention, "model_device", lambda model: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    before = torch._C._get_sdp_priority_order()
    with fast_attention(model):
        order = torch._C._get_sdp_priority_order()
    assert (order[0] == int(SDPBackend.CUDNN_ATTENTION)) == first
    assert torch._C._get_sdp_priority_order() == before


def packed_logits(model):
    """Of the second of two sequences in one window, and of the same sequence by itself."""
    ids = tiny.tokens(1, 8)
    packed = model(input_ids=ids, position_ids=PACKED, use_cache=False).logits[0, 4:]
    return packed, model(input_ids=ids[:, 4:], use_cache=False).logits[0]


def test_no_pass_waits_for_the_device_to_look_for_packed_sequences(monkeypatch):
    """transformers finds them by masking_utils.find_packed_sequence_indices()."""
    model, tokens = tiny.llama(), tiny.tokens(4, 24)
    with monkeypatch.context() as patch:
        asked = []
        patch.setattr(masking_utils, "find_packed_sequence_indices", asked.append)
        model(input_ids=tokens, use_cache=False)
        assert len(asked) == 1
    before, found = masking_utils.find_packed_sequence_indices, []
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda *_: found.append(masking_utils.find_packed_sequence_indices(PACKED)))
    measure(model, tokens, micro_batch=1)
    assert found == [None] * 4
    assert masking_utils.find_packed_sequence_indices is before
    assert before(PACKED).tolist() == [[0] * 4 + [1] * 4]


def test_packed_sequences_of_other_threads_are_found():
    before = masking_utils.find_packed_sequence_indices
    inside, left = threading.Event(), threading.Event()

    def other_calibration():
        with single_sequences():
            inside.set()
            left.wait(60)

    thread = threading.Thread(target=other_calibration)
    with single_sequences():
        thread.start()
        assert inside.wait(60)
    model = tiny.llama()
    torch.testing.assert_close(*packed_logits(model))  # beside a calibration that still runs
    left.set()
    thread.join()
    assert masking_utils.find_packed_sequence_indices is before
    with pytest.raises(RuntimeError), single_sequences():
        raise RuntimeError
    torch.testing.assert_close(*packed_logits(model))
