"""Kernels for one-shot pruning: statistics, budgets, selection and weight updates, for any pruner to import."""

from ._checks import bad_message
from ._describe import describe
from ._dispatch import BackendError, backends, explain, use_backend
from .allocate import allocate_budgets, allocate_row_budgets, global_row_scales
from .hooks import LayerStatistics, collect_hessians, collect_statistics
from .ops.obs import accumulate_gram_, obs_factor, obs_prune_
from .ops.packed import (
    PackedHeader,
    check_packed,
    pack_weight,
    packed_linear,
    packed_size,
    read_packed_header,
    unpack_mask,
    unpack_weight,
)
from .ops.removed import masked_weight, pack_mask, removed_sums
from .ops.select import foreach_row_topk_prune_, row_topk_mask, row_topk_prune_
from .ops.sparse24 import compress_24, compress_24_cusparselt, nm_mask, nm_prune_
from .ops.stats import accumulate_sq_sums_, foreach_accumulate_sq_sums_
from .ops.threshold import select_threshold

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "LayerStatistics",
    "PackedHeader",
    "accumulate_gram_",
    "accumulate_sq_sums_",
    "allocate_budgets",
    "allocate_row_budgets",
    "backends",
    "bad_message",
    "check_packed",
    "collect_hessians",
    "collect_statistics",
    "compress_24",
    "compress_24_cusparselt",
    "describe",
    "explain",
    "foreach_accumulate_sq_sums_",
    "foreach_row_topk_prune_",
    "global_row_scales",
    "masked_weight",
    "nm_mask",
    "nm_prune_",
    "obs_factor",
    "obs_prune_",
    "pack_mask",
    "pack_weight",
    "packed_linear",
    "packed_size",
    "read_packed_header",
    "removed_sums",
    "row_topk_mask",
    "row_topk_prune_",
    "select_threshold",
    "unpack_mask",
    "unpack_weight",
    "use_backend",
]
