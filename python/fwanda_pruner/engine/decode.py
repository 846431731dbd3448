"""Text that a model continues token by token, with keys and values in a cache.

transformers' generate() is not used: it compiles the model anew, and each step reads the whole cache, filled or not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, StaticCache, StaticLayer

from ..errors import UserError, is_lost_connection, one_line
from ..notes import warn
from .device import model_device
from .losses import invert_distribution, predictions

_SPANS = 8  # lengths of the cache that attention reads, one CUDA graph each
_ALIGNED = 64  # a multiple that attention kernels take without padding
_REPORTED = 32  # steps between two reports of progress, which wait for the device
_COMPARED, _ROUNDING, _AGREEING = 64, 0.05, 0.75  # positions, difference of probabilities, share of the positions
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # layers whose cache holds all tokens


class Decoder:
    """Draws tokens from a model's own predictions, for a fixed number of sequences at a time.

    Models that transformers can run with a static cache get one. On a GPU, one step of such a model is recorded as a
    CUDA graph and replayed, so that the host need not launch each kernel. Attention reads only the part of the cache
    that is filled, rounded up to an eighth of the length; each such span has a graph of its own. The first draw checks
    the result against the model without a cache. Models for which any of this fails run step by step, with the cache
    that they make themselves.

    Args:
        model: a causal language model in evaluation mode.
        sequences: number of sequences, B.
        length: tokens in each, L.
        records: whether a step may be recorded: not if weights move during it.
    """

    def __init__(self, model: nn.Module, sequences: int, length: int, *, records: bool = True):
        self._model, self._length, self._device = model, length, model_device(model)
        self._parameters = inspect.signature(model.forward).parameters
        self._position = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._token = torch.zeros(sequences, 1, dtype=torch.int64, device=self._device)
        self._drawn = torch.zeros(sequences, length, dtype=torch.int64, device=self._device)
        self._uniforms = torch.zeros(sequences, length, dtype=torch.float64, device=self._device)
        self._bad = torch.zeros((), dtype=torch.bool, device=self._device)
        self._static = _StaticCache(model, self._position, length) if _takes_static_cache(model) else None
        self._proven = self._static is None
        self._cache: Cache | None = None  # of a step, in a model that makes its own
        self._records = records and self._device.type == "cuda"
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @torch.no_grad()
    def draw(self, uniforms: Tensor, start_token: int, advance: Callable[[int], object]) -> Tensor:
        """Draws a token at each position, given the start token and the tokens drawn before.

        Args:
            uniforms: [b <= B, L] fp64 numbers in [0, 1). Each selects the token whose interval of the cumulative
                distribution it lies in.
            start_token: comes before the first drawn token.
            advance: called with the number of tokens that were drawn since the last call.

        Returns:
            [b, L] int64 drawn tokens on the CPU.

        Raises:
            UserError: the logits hold NaN.
        """
        self._uniforms.zero_()
        self._uniforms[: len(uniforms)] = uniforms.to(self._device)
        draw = self._draw_all if self._proven else self._draw_and_prove
        draw(start_token, lambda steps: advance(steps * len(uniforms)))
        return self._drawn[: len(uniforms)].to("cpu", copy=True)

    def _draw_and_prove(self, start_token: int, report: Callable[[int], object]) -> None:
        """Draws all tokens, and again with the cache of the model itself if the static one does not work."""
        self._proven, fault = True, None
        try:
            self._restart(start_token)
            for position in range(min(2, self._length)):  # some models fail only where the cache holds a token
                self._step_at(position)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of any type: it is the model's own code that fails
            fault = one_line(error)
        if fault is None:
            self._draw_all(start_token, report)
            if self._follows_predictions(start_token):
                return
            fault = "the predictions with it are others"
        warn(f"{type(self._model).__name__} cannot use a static cache, sampling is slower: {fault}")
        self._static, self._graphs = None, {}
        self._draw_all(start_token, report)

    def _follows_predictions(self, start_token: int) -> bool:
        """Whether the first sequence was drawn from what the model predicts without a cache, up to rounding."""
        ids = torch.cat([self._drawn.new_tensor([start_token]), self._drawn[0, :-1]])
        places = torch.linspace(0, self._length - 1, min(self._length, _COMPARED), dtype=torch.float32, device="cpu")
        places = places.long().to(self._device)
        cumulative = predictions(self._model, ids[None], places).cumsum(-1, dtype=torch.float64)
        token, uniform = self._drawn[0, places, None], self._uniforms[0, places, None]
        above = cumulative.gather(1, token)
        below = cumulative.gather(1, (token - 1).clamp(min=0)) * (token > 0)
        near = (uniform > below - _ROUNDING) & (uniform < above + _ROUNDING)
        return near.double().mean().item() >= _AGREEING

    def _restart(self, start_token: int) -> None:
        self._position.zero_()
        self._token.fill_(start_token)
        self._bad.fill_(False)
        self._cache = None

    def _draw_all(self, start_token: int, advance: Callable[[int], object]) -> None:
        """Draws all tokens of all sequences; `advance` is called with the number of steps."""
        self._restart(start_token)
        reported = 0
        for position in range(self._length):
            self._step_at(position)
            if (position + 1) % _REPORTED == 0 or position + 1 == self._length:
                if self._bad.item():
                    raise UserError(
                        "the model predicts NaN, so no text can be drawn from it; use --dtype bfloat16 or float32, or "
                        "another checkpoint"
                    )
                advance(position + 1 - reported)
                reported = position + 1

    def _step_at(self, position: int) -> None:
        if self._static is None:
            self._step()
            return
        span = self._static.span_of(position)
        if span in self._graphs:
            self._graphs[span].replay()
            return
        self._static.show(span)
        self._step()  # not recorded: it loads kernels and allocates the cache
        if self._records:
            self._graphs[span] = self._recorded_step()

    def _step(self) -> None:
        """Feeds the last token and draws the next. All that changes lies in tensors, so that a graph can repeat it."""
        static = self._static is not None
        name = "cache" if "cache" in self._parameters else "past_key_values"  # the older name
        arguments = {name: self._static if static else self._cache}
        if static and "cache_position" in self._parameters:  # transformers 4 cannot tell it from the cache in a graph
            arguments["cache_position"] = self._position
        kind = type(self._model).__name__
        try:
            output = self._model(input_ids=self._token, use_cache=True, **arguments)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if static or isinstance(error, torch.OutOfMemoryError) or is_lost_connection(error):
                raise
            raise UserError(f"{kind} cannot write text token by token ({one_line(error, 100)})") from error
        if not hasattr(output, "logits"):
            raise UserError(f"{kind} returns a {type(output).__name__} without logits, so it cannot write text")
        if not static:
            self._cache = getattr(output, name, None)
            if self._cache is None:
                raise UserError(f"{kind} returns no {name}, so it cannot write text token by token")
        probabilities = output.logits[:, -1].float().softmax(-1)
        self._bad |= probabilities[:, 0].isnan().any()  # a NaN or inf among the logits makes its whole row NaN
        token = invert_distribution(probabilities, self._uniforms.index_select(1, self._position))
        self._drawn.index_copy_(1, self._position, token[:, None])
        self._token.copy_(token[:, None])
        self._position += 1

    def _recorded_step(self) -> torch.cuda.CUDAGraph:
        """The next step as a graph. It does not run."""
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None  # no two graphs run at once
        with torch.cuda.graph(graph, pool=pool):
            self._step()
        return graph


class _StaticCache(StaticCache):
    """Keys and values of all layers in memory that does not move.

    Layers with a sliding window hold all positions too: the mask hides those outside the window.

    Args:
        model: whose layers need a cache.
        position: [1] int64, the position of the next token.
        length: the largest number of positions.
    """

    def __init__(self, model: nn.Module, position: Tensor, length: int):
        blocks = model.config.get_text_config(decoder=True).num_hidden_layers
        Cache.__init__(self, layers=[_StaticLayer(position, length) for _ in range(blocks)])
        self._length = length
        self._unit = -(-length // (_SPANS * _ALIGNED)) * _ALIGNED

    def span_of(self, position: int) -> int:
        """How many positions attention must read at this one."""
        return min((position // self._unit + 1) * self._unit, self._length)

    def show(self, span: int) -> None:
        """Shows attention the first `span` positions."""
        for layer in self.layers:
            layer.show(span)


class _StaticLayer(StaticLayer):
    """Keys and values of one layer, [B, heads, span, head size] as far as they are shown."""

    def __init__(self, position: Tensor, length: int):
        super().__init__(max_cache_len=length)
        self._position, self._length, self._whole = position, length, None

    def show(self, span: int) -> None:
        self.max_cache_len = span  # the length of the mask
        if self._whole is not None:
            self.keys, self.values = (states[:, :, :span] for states in self._whole)

    def update(self, key_states: Tensor, value_states: Tensor, *_args, **_kwargs) -> tuple[Tensor, Tensor]:
        if self._whole is None:
            both = (key_states, value_states)
            self._whole = [x.new_zeros(*x.shape[:2], self._length, x.shape[-1]) for x in both]
            self.is_initialized = True
            self.show(self.max_cache_len)
        self.keys.index_copy_(2, self._position, key_states)
        self.values.index_copy_(2, self._position, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> Tensor:
        return self._position[0]


def _takes_static_cache(model: nn.Module) -> bool:
    layers = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ["full_attention"]
    return getattr(model, "_can_compile_fullgraph", False) and set(layers) <= _ATTENTION


@torch.no_grad()
def cache_bytes(model: nn.Module, token: int) -> int:
    """Bytes of keys and values that one token takes in the caches of all layers; 0 if the model keeps none there."""
    output = model(input_ids=torch.full((1, 1), token, dtype=torch.int64, device=model_device(model)), use_cache=True)
    cache = getattr(output, "cache", None) or getattr(output, "past_key_values", None)
    states = [getattr(layer, name, None) for layer in getattr(cache, "layers", ()) for name in ("keys", "values")]
    return sum(state.nbytes for state in states if isinstance(state, Tensor))
