"""The methods restated, slow and plain: what the tests compare the kernels and the pruner with.

Nothing here uses fwanda_kernels or fwanda_pruner. Sums, gradients and updates are float64.
Shapes: weights [R, C], S windows of L tokens, T = S L tokens, vocabulary V.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from math import exp, floor

import torch
from torch import Tensor, nn

# Linear layers, and what flows through them


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """name -> linear layer, without the head. Those of GPT-2 are `Conv1D` and hold their weights transposed."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") and module is not head
    }


def weight_of(module: nn.Module) -> Tensor:
    """[R, C] view of the weights of a linear layer."""
    return module.weight.data.T if type(module).__name__ == "Conv1D" else module.weight.data


@contextmanager
def retained(modules: dict[str, nn.Module]) -> Iterator[dict[str, list[tuple[Tensor, Tensor]]]]:
    """Inside the block: name -> (input [..., C], output [..., R]) of each call; outputs keep their gradients."""
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in modules}

    def hook_of(name):
        def hook(_module, args, output):
            if output.requires_grad:
                output.retain_grad()
            calls[name].append((args[0].detach(), output))

        return hook

    handles = [module.register_forward_hook(hook_of(name)) for name, module in modules.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def inputs_of(model: nn.Module, tokens: Tensor, modules: dict[str, nn.Module] | None = None) -> dict[str, Tensor]:
    """name -> [T, C] inputs of linear layers (all of the model by default), window by window, in the model's dtype."""
    with torch.no_grad(), retained(linear_layers(model) if modules is None else modules) as calls:
        for ids in tokens:
            model(input_ids=ids[None], use_cache=False)
    return {name: torch.cat([x.flatten(0, -2) for x, _ in parts]) for name, parts in calls.items()}


def inputs_and_gradients(
    model: nn.Module, tokens: Tensor, labels_of: Callable[[int, Tensor], Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs [T, C] and output gradients [T, R] of each linear layer, by name, in float64.

    The loss of a window is its cross-entropy, summed over its L - 1 predictions.

    Args:
        model: left as it is; a copy in float64 runs.
        tokens: [S, L] int64.
        labels_of: (window, logits [L - 1, V]) -> labels [L - 1], where -100 has no loss. The next tokens by default.
    """
    model = copy.deepcopy(model).double().requires_grad_(True)
    with retained(linear_layers(model)) as calls:
        for window, ids in enumerate(tokens):
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            labels = ids[1:] if labels_of is None else labels_of(window, logits.detach())
            nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    inputs = {name: torch.cat([x.flatten(0, -2) for x, _ in parts]) for name, parts in calls.items()}
    return inputs, {name: torch.cat([y.grad.flatten(0, -2) for _, y in parts]) for name, parts in calls.items()}


def sums_of_squares(model: nn.Module, tokens: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """name -> (x2 [C], g2 [R]): squared inputs and squared output gradients, summed over the T tokens."""
    inputs, grads = inputs_and_gradients(model, tokens)
    return {name: (x.square().sum(0), grads[name].square().sum(0)) for name, x in inputs.items()}


def token_sq_grads(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """name -> [T] squared output gradients, summed over the rows."""
    return {name: grads.square().sum(1) for name, grads in inputs_and_gradients(model, tokens)[1].items()}


def drawn_labels(tokens: Tensor, seed: int) -> Callable[[int, Tensor], Tensor]:
    """The labels of `--fisher true`, as `labels_of`.

    Each position has a number in [0, 1). Its label is the first whose cumulative probability exceeds that number.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(len(tokens), tokens.shape[1] - 1, dtype=torch.float64, generator=generator)
    return lambda window, logits: (logits.softmax(-1).cumsum(-1) <= numbers[window, :, None]).sum(-1)


def gains(model: nn.Module, tokens: Tensor, keep: dict[str, Tensor]) -> dict[str, Tensor]:
    """name -> [R, C] float64: how far the loss of the pruned model would fall, to first order, if a weight came back.

    That is -dL/dW' W where `keep` (name -> [R, C] bool) is False, and 0 elsewhere. W are the dense and W' the pruned
    weights; L is the cross-entropy summed over all predictions of `tokens` [S, L].
    """
    pruned = copy.deepcopy(model).double().requires_grad_(True)
    layers = linear_layers(pruned)
    dense = {name: weight_of(layers[name]).clone() for name in keep}
    for name, mask in keep.items():
        weight_of(layers[name]).mul_(mask)
    summed_loss(pruned, tokens).backward()
    gained = {}
    for name, mask in keep.items():
        slope = layers[name].weight.grad
        slope = slope.T if type(layers[name]).__name__ == "Conv1D" else slope
        gained[name] = -(slope * dense[name]).masked_fill(mask, 0)
    return gained


# Losses


def summed_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross-entropy summed over all predictions of [S, L] tokens, from whole logits."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


@torch.no_grad()
def losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """[S, L - 1] float64: minus the logarithm of the probability of each next token, from whole logits."""
    log_p = torch.cat([model(input_ids=ids[None], use_cache=False).logits for ids in tokens]).double().log_softmax(-1)
    return -log_p[:, :-1].gather(2, tokens[:, 1:, None].long()).squeeze(2)


def perplexity(model: nn.Module, tokens: Tensor) -> float:
    """exp of the mean loss of all predictions of [S, L] tokens."""
    return exp(losses(model, tokens).mean())


# Magnitude and Wanda


def lowest(scores: Tensor, count: int | Tensor) -> Tensor:
    """True at the `count` (a number, or [R]) lowest of each row of [R, C], the lowest column first among ties."""
    ranks = torch.sort(scores, dim=1, stable=True).indices.argsort(dim=1)
    return ranks < torch.as_tensor(count).view(-1, 1)


def wanda_scores(weight: Tensor, x2: Tensor) -> Tensor:
    """[R, C] float32 |W_ij| ||x_j||."""
    return weight.float().abs() * x2.float().sqrt()


def wanda(model: nn.Module, tokens: Tensor, sparsity: str) -> None:
    """Prune each row by its Wanda scores, with the inputs of the dense model."""
    removed = {}
    for name, x in inputs_of(model, tokens).items():
        weight = weight_of(linear_layers(model)[name])
        removed[name] = lowest(wanda_scores(weight, x.double().square().sum(0)), count_of(sparsity, weight.shape[1]))
    for name, module in linear_layers(model).items():
        weight_of(module)[removed[name]] = 0


@torch.no_grad()
def sequential_wanda(model: nn.Module, tokens: Tensor, sparsity: str) -> None:
    """Prune a Llama block by block; the hidden states of all windows go from each pruned block to the next."""
    hidden = [model.model.embed_tokens(window[None]) for window in tokens]
    positions = torch.arange(tokens.shape[1])[None]
    rotary = model.model.rotary_emb(hidden[0], positions)
    for block in model.model.layers:
        layers = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}

        def run(x, block=block):  # no mask: the attention of a whole window is causal by itself
            output = block(x, position_embeddings=rotary, position_ids=positions)
            return output[0] if isinstance(output, tuple) else output

        with retained(layers) as calls:
            for x in hidden:
                run(x)
        for name, module in layers.items():
            x2 = sum(x.double().square().sum((0, 1)) for x, _ in calls[name])
            weight = module.weight.data
            weight[lowest(wanda_scores(weight, x2), count_of(sparsity, weight.shape[1]))] = 0
        hidden = [run(x) for x in hidden]


def count_of(sparsity: str, numel: int) -> int:
    """floor(sparsity numel), in exact arithmetic: "0.29" of 100 is 29."""
    return floor(Fraction(sparsity) * numel)


# F-Wanda


def global_row_scales(
    weights: list[Tensor], omegas: list[Tensor], norms: list[Tensor], row_exponent: float, layer_exponent: float
) -> list[Tensor]:
    """[R] float64 of each matrix: what `--allocation global` multiplies the scores of its rows by.

    a_i = omega_i^(b/2) m_i^(b-1) / mean(omega^(b/2) m^b)^(1-c), where omega_i is divided by the mean over all rows of
    all matrices, m_i is the mean Wanda score of row i, b is the row exponent and c the layer exponent.
    """
    b, c, mean = row_exponent, layer_exponent, torch.cat(omegas).double().mean()
    scales = []
    for weight, omega, norm in zip(weights, omegas, norms, strict=True):
        m, omega = (weight.double().abs() * norm.double()).mean(1), omega.double() / mean
        scales.append(omega ** (b / 2) * m ** (b - 1) / (omega ** (b / 2) * m**b).mean() ** (1 - c))
    return scales


def global_keep(scores: list[Tensor], total: int) -> list[Tensor]:
    """Masks of the `total` highest of all scores [R, C] together; among ties the later matrix, row and column stay."""
    flat = torch.cat([s.flatten() for s in scores])
    keep = torch.zeros_like(flat, dtype=torch.bool)
    keep[torch.sort(flat, stable=True).indices[len(flat) - total :]] = True
    return [k.view(s.shape) for k, s in zip(keep.split([s.numel() for s in scores]), scores, strict=True)]


def packed(mask: Tensor) -> Tensor:
    """[R, C] bool -> [R, ceil(C / 8)] uint8: bit j % 8 of byte j // 8 is column j."""
    bits = nn.functional.pad(mask.int(), (0, -mask.shape[1] % 8)).unflatten(1, (-1, 8))
    return (bits * 2 ** torch.arange(8)).sum(2).to(torch.uint8)


def unpacked(bits: Tensor, cols: int) -> Tensor:
    """The inverse of packed(): [R, cols] bool."""
    return torch.stack([bits[:, j // 8] >> (j % 8) & 1 for j in range(cols)], 1).bool()


# The response


def moved_scales(
    rows: dict[str, Tensor],
    columns: dict[str, Tensor],
    squares: dict[str, Tensor],
    passes: list[dict[str, Tensor]],
    step: float,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Scales of rows [R] and columns [C] of each matrix after a round, in float64.

    A matrix, row or column is measured by the sum of gains over all passes, and predicted by its sum of squares. The
    scales move by a power of measured / predicted: 0.15 step for the matrix, 0.05 step for a line in its matrix.

    Args:
        rows, columns: name -> scales.
        squares: name -> [R, C] squared scores of the removed weights, 0 elsewhere.
        passes: gains() of each backward pass.
        step: share of the steps of the first round.
    """
    matrices = {name: float(sum(gained[name].sum() for gained in passes) / squares[name].sum()) for name in squares}
    positive = sorted(ratio for ratio in matrices.values() if ratio > 0)
    middle = positive[(len(positive) - 1) // 2]
    new_rows, new_columns = {}, {}
    for name, square in squares.items():
        own = min(max(matrices[name] / middle, 1 / 5), 5) ** (0.15 * step)
        lines = []
        for axis in (1, 0):
            sums = torch.stack([gained[name].sum(axis) for gained in passes])
            ratios = _shrunk_ratios(matrices[name] * square.double().sum(axis), sums)
            lines.append(ratios.clamp(0.1, 10) ** (0.05 * step))
        new_rows[name] = rows[name].double() * own * lines[0]
        new_columns[name] = columns[name].double() * lines[1]
    return new_rows, new_columns


def _shrunk_ratios(expected: Tensor, sums: Tensor) -> Tensor:
    """Measured / expected of each line, from sums [passes, lines], shrunk towards 1 by the variance of the measured."""
    measured = sums.sum(0)
    if measured.sum() <= 0:
        return torch.ones_like(expected)
    noise = sums.var(0) * len(sums)
    spread = ((measured - expected).square() - noise).sum() / expected.square().sum()
    signal = max(float(spread), 0.0) * expected.square()
    shrunk = 1 + (measured / expected - 1) * signal / (signal + noise)
    return torch.where(signal > 0, shrunk, 1)


# SparseGPT and F-SparseGPT


def damped(hessian: Tensor, damping: float = 0.01) -> Tensor:
    """float64 Hessian with 1 on the diagonal of dead columns, and damping * mean(diagonal) added to the diagonal."""
    wide = hessian.double().clone()
    diagonal = wide.diagonal()
    diagonal[diagonal == 0] = 1
    diagonal += damping * diagonal.mean().item()
    return wide


def obs_walk(
    weight: Tensor,
    hessian: Tensor,
    *,
    sparsity: str | None = None,
    keep: Tensor | None = None,
    mask: Tensor | None = None,
    pattern: tuple[int, int] | None = None,
    row_weight: Tensor | None = None,
    block: int = 128,
    damping: float = 0.01,
) -> tuple[Tensor, Tensor]:
    """Prune a column at a time with the inverse Hessian of the columns from it on.

    Give one of `sparsity`, `keep` ([R] weights kept in a row), `mask` ([R, C], True = kept) or `pattern` (n of m kept).

    Returns:
        The pruned weights [R, C] float64, and the mask [R, C] of what was removed.
    """
    w = weight.double().clone()
    rows, cols = w.shape
    h = damped(hessian, damping)
    w[:, hessian.diagonal() == 0] = 0
    inverses = [torch.linalg.inv(h[c:, c:]) for c in range(cols)]
    weights_of_rows = torch.ones(rows, dtype=torch.float64) if row_weight is None else row_weight.double()
    gone = torch.zeros(rows, cols, dtype=torch.bool) if mask is None else ~mask
    step = block if pattern is None else pattern[1]

    for c in range(cols):
        a, b = c, min(c + step, cols)
        if c % step == 0 and mask is None:
            diagonal = torch.stack([inverses[j][0, 0] for j in range(a, b)])
            scores = w[:, a:b].square() / diagonal * weights_of_rows[:, None]
            if sparsity is not None:
                count = count_of(sparsity, rows * b) - count_of(sparsity, rows * a)
                gone[:, a:b] = lowest(scores.view(1, -1), count).view(rows, b - a)
            else:
                for i in range(rows):
                    pruned = 0 if keep is None else cols - int(keep[i])
                    count = pattern[1] - pattern[0] if pattern else pruned * b // cols - pruned * a // cols
                    gone[i, a:b] = lowest(scores[i : i + 1], count)[0]
        error = torch.where(gone[:, c], w[:, c], 0) / inverses[c][0, 0]
        w[:, c:] -= error[:, None] * inverses[c][0]
        w[gone[:, c], c] = 0
    return w, gone
