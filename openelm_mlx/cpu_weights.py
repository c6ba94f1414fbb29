"""Weights in the form that a Linux CPU multiplies fastest; Macs and GPUs keep what they have.

MLX computes 16-bit products on a CPU in a plain loop, 10 times slower than OpenBLAS's in float32.
And OpenBLAS 0.3 copies the matrix of ``x @ W.T`` before it multiplies, which takes 1.2 to 1.7 times
as long when the numbers of one *output* lie together, as they do in every checkpoint, than when
those of one *input* do; with hundreds of rows in ``x`` the copy no longer counts.
"""

import logging

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx import blas
from openelm_mlx.memory import machine_memory
from openelm_mlx.model import Model, num_parameters

logger = logging.getLogger(__name__)

_WORTH_CASTING = 8  # tokens for which the second that it costs (270M) comes back
_WORTH_ARRANGING = 64  # the same for 3.6 seconds
_SHARE = 0.5  # of the machine's memory that the weights may take


def helps_here() -> bool:
    """Whether MLX computes on a CPU with OpenBLAS under it."""
    return blas.status.startswith("loaded") and mx.default_device().type != mx.gpu


def prepare_for_generation(model: Model, *, tokens: int) -> None:
    """Make the weights quick to decode with, where that pays: float32, inputs first in memory.

    Shapes stay, values too: a 16-bit number is also a float32 one. What is computed with them is
    no longer rounded to 16 bits, so a text may differ from that of the same folder on a GPU.

    Args:
        model: in eval mode; changed in place. Quantised layers keep their codes.
        tokens: of prompts and answers that will be computed, about.
    """
    if not helps_here():
        return
    if tokens >= _WORTH_CASTING:
        cast_to_float32(model)
    if tokens >= _WORTH_ARRANGING:
        put_inputs_first(model)


def cast_to_float32(model: Model) -> bool:
    """Compute in float32 from now on, where 16 bits are slow and the memory is there.

    Args:
        model: changed in place.

    Returns:
        Whether it was changed.
    """
    if not helps_here() or model.transformer.norm.weight.dtype == mx.float32:
        return False
    if not float32_fits(model, _SHARE):
        logger.warning(
            "16-bit weights are computed some 10 times slower than float32 on this CPU, and in "
            "float32 they would not fit well into its memory"
        )
        return False
    model.set_dtype(mx.float32)
    logger.info("16-bit weights are computed in float32, which is 10 times faster on this CPU")
    return True


def float32_fits(model: Model, share: float) -> bool:
    """Whether the weights, in float32, take no more than a share of the machine's memory."""
    return 4 * num_parameters(model) <= share * machine_memory()


def put_inputs_first(model: Model) -> None:
    """Lay float32 matrices out column by column; their shapes and values stay as they are."""
    for _, module in model.named_modules():
        if type(module) not in (nn.Linear, nn.Embedding) or module.weight.dtype != mx.float32:
            continue
        module.weight = mx.contiguous(module.weight.T).T
        mx.eval(module.weight)  # one at a time: no more than one matrix is there twice
