"""What a cost model must know of a model: the sizes of its linear layers, by the inputs that they share."""

from __future__ import annotations

from dataclasses import dataclass

from .shapes import SHAPES


@dataclass(frozen=True)
class Linears:
    """Linear layers with the same input.

    Attributes:
        columns: C.
        rows: R of each layer.
        copies: how many such sets there are, each with an input of its own: experts.
        share: of the tokens that each copy sees.
    """

    columns: int
    rows: tuple[int, ...]
    copies: int = 1
    share: float = 1.0

    @property
    def weights(self) -> int:
        return self.columns * sum(self.rows) * self.copies


@dataclass(frozen=True)
class Block:
    """Decoder blocks of one kind.

    Attributes:
        count: how many there are.
        linears: of one block.
        gated: I of one token, in all experts that it reaches.
    """

    count: int
    linears: tuple[Linears, ...]
    gated: int

    @property
    def weights(self) -> int:
        return sum(linears.weights for linears in self.linears)

    @property
    def active(self) -> float:
        """Weights that a token is multiplied by."""
        return sum(linears.weights * linears.share for linears in self.linears)

    @property
    def layers(self) -> int:
        return sum(len(linears.rows) * linears.copies for linears in self.linears)

    @property
    def hessians(self) -> int:
        """Bytes of all Hessians, fp32."""
        return sum(4 * linears.columns**2 * linears.copies for linears in self.linears)

    @property
    def largest_hessian(self) -> int:
        return max(4 * linears.columns**2 for linears in self.linears)


@dataclass(frozen=True)
class Shape:
    """A model.

    Attributes:
        hidden, vocab: H and V. The head has weights of its own.
        channels: of attention: heads x (width of a key + width of a value).
        blocks: by kind.
    """

    name: str
    hidden: int
    vocab: int
    channels: int
    blocks: tuple[Block, ...]

    @property
    def depth(self) -> int:
        return sum(block.count for block in self.blocks)

    @property
    def outside(self) -> int:
        """Weights outside of the blocks: embedding and head."""
        return 2 * self.vocab * self.hidden

    @property
    def inside(self) -> int:
        return sum(block.count * block.weights for block in self.blocks)

    @property
    def weights(self) -> int:
        return self.inside + self.outside

    @property
    def active(self) -> float:
        """Weights that a token is multiplied by, in the whole model."""
        return self.outside + sum(block.count * block.active for block in self.blocks)

    @property
    def largest_block(self) -> int:
        return max(block.weights for block in self.blocks)


def dense(name: str, numbers: dict[str, int]) -> Shape:
    """A model of the Llama kind, from numbers of its configuration."""
    hidden, heads, inner = numbers["hidden_size"], numbers["num_attention_heads"], numbers["intermediate_size"]
    width = hidden // heads
    keys = width * numbers["num_key_value_heads"]
    linears = (
        Linears(hidden, (hidden, keys, keys)),
        Linears(hidden, (hidden,)),
        Linears(hidden, (inner, inner)),
        Linears(inner, (hidden,)),
    )
    block = Block(numbers["num_hidden_layers"], linears, inner)
    return Shape(name, hidden, numbers["vocab_size"], heads * 2 * width, (block,))


def deepseek_v3() -> Shape:
    """DeepSeek-V3 without its layer that predicts a second token: 3 dense blocks, then 58 with experts.

    A token reaches 8 of 256 experts, and one that serves all tokens.
    """
    hidden, heads, inner, dense_inner, experts, used = 7168, 128, 2048, 18432, 256, 8
    attention = (
        Linears(hidden, (1536, 512 + 64)),
        Linears(1536, (heads * 192,)),
        Linears(512, (heads * (128 + 128),)),
        Linears(heads * 128, (hidden,)),
    )
    routed = {"copies": experts, "share": used / experts}
    mlp = (Linears(hidden, (dense_inner, dense_inner)), Linears(dense_inner, (hidden,)))
    mixture = (
        Linears(hidden, (inner, inner)),
        Linears(inner, (hidden,)),
        Linears(hidden, (inner, inner), **routed),
        Linears(inner, (hidden,), **routed),
    )
    blocks = (Block(3, attention + mlp, dense_inner), Block(58, attention + mixture, (used + 1) * inner))
    return Shape("deepseek-v3", hidden, 129280, heads * (192 + 128), blocks)


def shape_of(name: str, blocks: int | None = None) -> Shape:
    """The shape of a name in SHAPES, perhaps with fewer blocks; or DeepSeek-V3."""
    if name == "deepseek-v3":
        return deepseek_v3()
    numbers = SHAPES[name][1]
    return dense(name, numbers if blocks is None else numbers | {"num_hidden_layers": blocks})
