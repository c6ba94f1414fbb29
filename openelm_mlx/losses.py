"""Cross-entropy with z-loss, fused with the output head; sequence log-probabilities; DPO losses.

B batch, L tokens, N = B L, D model_dim, V vocabulary. All reductions are sums in float32, so that
micro-batches and ranks add up; the caller divides once by the number of targets. Logits exist for
one chunk of tokens at a time, never (N, V). Sources: apple/corenet@1aa3acd
``corenet/loss_fn/language_modeling/cross_entropy.py``; Rafailov et al. 2023 (arXiv 2305.18290).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx import cpu_exp

CHUNK = 256  # tokens whose logits exist at a time

Head = Callable[[mx.array], mx.array]  # (n, D) hidden states -> (n, V) logits


@dataclass(frozen=True, kw_only=True)
class LossArgs:
    """Settings of the language-modelling loss.

    Raises:
        ValueError: for values out of range.
    """

    z_loss: float = 0.0  # weight of log(Z)^2; Apple's recipes use 1e-4
    label_smoothing: float = 0.0
    corenet_z_loss: bool = False  # report ignored positions as CoreNet does; gradients are equal
    loss_chunk: int = CHUNK  # tokens whose logits exist at a time

    def __post_init__(self) -> None:
        if self.z_loss < 0:
            raise ValueError(f"z_loss must be 0 (off) or more, got {self.z_loss}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")
        if self.loss_chunk < 1:
            raise ValueError(f"loss_chunk must be at least 1 token, got {self.loss_chunk}")


def cross_entropy_sums(
    logits: mx.array, targets: mx.array, mask: mx.array, args: LossArgs | None = None
) -> mx.array:
    """Summed loss of materialised logits; the reference that the fused form must equal.

    Args:
        logits: (n, V), any float type; reduced in float32.
        targets: (n,) token ids.
        mask: (n,), 1 where the target counts.
        args: z-loss and label smoothing; None is plain cross-entropy.

    Returns:
        float32 scalar: sum over counted targets of -log p, smoothed, plus z_loss log(Z)^2.
    """
    args = args or LossArgs()
    logits = logits.astype(mx.float32)
    mask = mask.astype(mx.float32)
    log_z = cpu_exp.log_sum_exp(logits)[:, 0]
    picked = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    if args.label_smoothing:
        smooth = args.label_smoothing
        picked = (1 - smooth) * picked + smooth * logits.mean(axis=-1)
    loss = log_z - picked
    if args.z_loss:
        loss = loss + args.z_loss * mx.square(log_z)
    return (loss * mask).sum()


def fused_cross_entropy(
    hidden: mx.array,
    head: nn.Module,
    targets: mx.array,
    mask: mx.array,
    args: LossArgs | None = None,
    *,
    head_trains: bool,
) -> mx.array:
    """Output head and cross-entropy in one, a chunk of tokens at a time.

    The gradient is formed in the forward pass, where the logits are at hand, so nothing is
    computed twice and no more than one chunk of logits is alive.

    Args:
        hidden: (N, D) normalised hidden states.
        head: what makes logits of them: the embedding table or ``lm_head``, plain or quantised;
            anything else (an adapter, say) is recomputed in the backward pass instead.
        targets: (N,) token ids.
        mask: (N,), 1 where the target counts.
        args: the loss's settings.
        head_trains: whether the head's matrix needs a gradient.

    Returns:
        float32 scalar, differentiable once with respect to ``hidden`` and the head's matrix.
    """
    args = args or LossArgs()
    if type(head) not in (nn.Linear, nn.Embedding, nn.QuantizedLinear, nn.QuantizedEmbedding):
        return _checkpointed(hidden, head, targets, mask, args)
    matrix = _Matrix(head)

    @mx.custom_function
    def loss(hidden: mx.array, weight: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        return _loss_and_gradients(hidden, weight, matrix, targets, mask, args, head_trains)

    @loss.vjp
    def backward(_: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array]:
        scale = cotangents[0]
        hidden_gradient, weight_gradient = outputs[1], outputs[2]
        return (
            (hidden_gradient * scale).astype(hidden.dtype),
            (weight_gradient * scale).astype(head.weight.dtype)
            if head_trains
            else mx.zeros_like(head.weight),
        )

    outputs: Any = loss(hidden, head.weight)
    return outputs[0]


def chunked_cross_entropy(
    hidden: mx.array, head: Head, targets: mx.array, mask: mx.array, args: LossArgs | None = None
) -> mx.array:
    """The summed loss without gradients, a chunk of tokens at a time; for evaluation."""
    args = args or LossArgs()
    total = mx.array(0.0)
    for rows in _chunks(hidden.shape[0], args.loss_chunk):
        total = total + cross_entropy_sums(head(hidden[rows]), targets[rows], mask[rows], args)
    return total


def ignored_z_loss(num_ignored: mx.array, vocab_size: int, args: LossArgs) -> mx.array:
    """What CoreNet's z-loss adds for positions that do not count: log(V)^2 each, no gradient.

    It multiplies their logits by 0 *before* log-sum-exp (``cross_entropy.py``, l. 104-109).
    """
    return num_ignored.astype(mx.float32) * (args.z_loss * math.log(vocab_size) ** 2)


def sequence_logprobs(logits: mx.array, targets: mx.array, mask: mx.array) -> mx.array:
    """Log-probability of each sequence's unmasked targets, in nats.

    Args:
        logits: (B, L, V), any float type; reduced in float32.
        targets: (B, L) token ids; position t holds the token after input t.
        mask: (B, L), 1 where the target counts and 0 on prompt and padding.

    Returns:
        (B,) float32 sums, the log pi(y|x) of Rafailov et al. 2023, eq. 7.

    Raises:
        ValueError: if ``mask`` and ``targets`` differ in shape from each other or from ``logits``.
    """
    _check_shapes(logits, targets, mask)
    logits = logits.astype(mx.float32)
    picked = mx.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return ((picked - cpu_exp.log_sum_exp(logits)[..., 0]) * mask).sum(axis=-1)


def fused_sequence_logprobs(
    hidden: mx.array, head: nn.Module, targets: mx.array, mask: mx.array, *, chunk: int = CHUNK
) -> mx.array:
    """:func:`sequence_logprobs` from hidden states, logits recomputed in the backward pass.

    Args:
        hidden: (B, L, D) normalised hidden states.
        head: the embedding table or ``lm_head``, adapted or not.
        targets: (B, L) token ids.
        mask: (B, L), 1 where the target counts.
        chunk: tokens whose logits exist at a time.

    Returns:
        (B,) float32.
    """
    _check_shapes(hidden, targets, mask)
    B, L, D = hidden.shape

    logits_of = _logits_of(head)
    flat, wanted = hidden.reshape(B * L, D), targets.reshape(B * L)

    def logprobs(rows: slice) -> mx.array:
        def part(hidden: mx.array) -> mx.array:
            logits = logits_of(hidden).astype(mx.float32)
            picked = mx.take_along_axis(logits, wanted[rows, None], axis=-1)[:, 0]
            return picked - cpu_exp.log_sum_exp(logits)[:, 0]

        return nn.utils.checkpoint(head, part)(flat[rows])

    parts = [logprobs(rows) for rows in _chunks(B * L, chunk)]
    return (mx.concatenate(parts).reshape(B, L) * mask).sum(axis=-1)


def _check_shapes(values: mx.array, targets: mx.array, mask: mx.array) -> None:
    if not values.shape[:2] == targets.shape == mask.shape:
        raise ValueError(
            f"targets {targets.shape} and mask {mask.shape} must both be (B, L) = "
            f"{values.shape[:2]}; is the mask shifted by one?"
        )


class _Matrix:
    """The (V, D) matrix of a head, plain or quantised, as two products."""

    def __init__(self, head: nn.Module) -> None:
        self._quantised: dict[str, Any] | None = None
        if isinstance(head, nn.QuantizedLinear | nn.QuantizedEmbedding):
            self._quantised = {
                "scales": head.scales,
                "biases": head.get("biases"),
                "group_size": head.group_size,
                "bits": head.bits,
                "mode": head.mode,
            }

    def logits(self, hidden: mx.array, weight: mx.array) -> mx.array:
        """(n, D) @ (D, V)."""
        if self._quantised is None:
            return hidden @ weight.T
        return mx.quantized_matmul(hidden, weight, transpose=True, **self._quantised)

    def back(self, gradient: mx.array, weight: mx.array) -> mx.array:
        """(n, V) @ (V, D)."""
        if self._quantised is None:
            return gradient @ weight
        return mx.quantized_matmul(gradient, weight, transpose=False, **self._quantised)


def _loss_and_gradients(
    hidden: mx.array,
    weight: mx.array,
    matrix: _Matrix,
    targets: mx.array,
    mask: mx.array,
    args: LossArgs,
    head_trains: bool,
) -> tuple[mx.array, mx.array, mx.array]:
    """The summed loss and its unscaled gradients, (N, D) and float32 (V, D)."""
    total = mx.array(0.0)
    weight_gradient = mx.zeros(weight.shape if head_trains else (1,), mx.float32)
    gradients: list[mx.array] = []
    for rows in _chunks(hidden.shape[0], args.loss_chunk):
        part = hidden[rows]
        if gradients:  # one chunk after the other, or all logits would be alive at once
            done = [gradients[-1], weight_gradient] if head_trains else [gradients[-1]]
            part = mx.depends(part, done)
        logits = matrix.logits(part, weight).astype(mx.float32)
        loss, gradient = _chunk_gradient(logits, targets[rows], mask[rows], args)
        gradient = gradient.astype(hidden.dtype)
        total = total + loss
        gradients.append(matrix.back(gradient, weight))
        if head_trains:
            weight_gradient = weight_gradient + (gradient.T @ part).astype(mx.float32)
    return total, mx.concatenate(gradients), weight_gradient


def _chunk_gradient(
    logits: mx.array, targets: mx.array, mask: mx.array, args: LossArgs
) -> tuple[mx.array, mx.array]:
    """The summed loss of (n, V) float32 logits and its gradient with respect to them."""
    V, smooth = logits.shape[-1], args.label_smoothing
    counts = mask.astype(mx.float32)[:, None]
    log_z = cpu_exp.log_sum_exp(logits)
    picked = mx.take_along_axis(logits, targets[:, None], axis=-1)
    if smooth:
        picked = (1 - smooth) * picked + smooth * logits.mean(axis=-1, keepdims=True)
    loss = ((log_z - picked + args.z_loss * mx.square(log_z)) * counts).sum()
    gradient = cpu_exp.exp(logits - log_z) * ((1 + 2 * args.z_loss * log_z) * counts)
    if smooth:
        gradient = gradient - (smooth / V) * counts
    at_target = mx.take_along_axis(gradient, targets[:, None], axis=-1) - (1 - smooth) * counts
    return loss, mx.put_along_axis(gradient, targets[:, None], at_target, axis=-1)


def _checkpointed(
    hidden: mx.array, head: nn.Module, targets: mx.array, mask: mx.array, args: LossArgs
) -> mx.array:
    # nn.utils.checkpoint, as mx.checkpoint gives captured parameters no gradient
    logits_of = _logits_of(head)

    def part(rows: slice) -> mx.array:
        def loss(hidden: mx.array) -> mx.array:
            return cross_entropy_sums(logits_of(hidden), targets[rows], mask[rows], args)

        return nn.utils.checkpoint(head, loss)(hidden[rows])

    return mx.stack([part(rows) for rows in _chunks(hidden.shape[0], args.loss_chunk)]).sum()


def _logits_of(head: nn.Module) -> Head:
    return head.as_linear if hasattr(head, "as_linear") else head


def _chunks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
