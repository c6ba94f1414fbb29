"""Integer codes with a scale for each block of the input axis: made here, or carried over from MLX.

Core ML reads ``scale * (code - offset)`` where MLX reads ``scale * code + bias``. Codes are kept
signed, so that an offset is a small number and float16 holds it well. Core ML's op knows codes of
4 and 8 bits: MLX's 3 bits travel in 4, its 5 and 6 in 8.
"""

from dataclasses import dataclass, replace

import numpy as np

INT4_BLOCK = 32
_INTEGER = 0.01  # of a step: an offset this near an integer is stored as one
_RELATIVE = 2.0**-10  # of a group's largest weight: what rounding to float16 may move one,
_SAID = 0.1  # or so much of a step; beyond this a note says so,
_REFUSED = 0.5  # and beyond this the matrix is refused
_CHUNK = 1 << 18  # weights worked on at a time: they stay in the processor's cache
_SHRINK = (1.0, 0.95, 0.9, 0.875, 0.85, 0.8, 0.75, 0.7)  # clipping ranges tried for int4
_TINY = "some scales are so small that float16 rounds them by up to half a step of a weight"
DEQUANTIZE = "make a plain copy with `openelm fuse --dequantize` first"


@dataclass(frozen=True, kw_only=True)
class Codes:
    """A matrix as Core ML's ``constexpr_blockwise_shift_scale`` stores it.

    Attributes:
        codes: (out, in) int8, within ``bits`` signed bits.
        bits: 4 or 8.
        scale: (out, blocks) float16.
        offset: (out, blocks) int8 or float16, or None for zero.
        note: what was not as asked, for the user; empty where all was.
    """

    codes: np.ndarray
    bits: int
    scale: np.ndarray
    offset: np.ndarray | None = None
    note: str = ""


def chunks(rows: int, columns: int) -> list[slice]:
    """Slices of the rows, each of some 2^18 weights."""
    height = max(1, _CHUNK // columns)
    return [slice(start, min(start + height, rows)) for start in range(0, rows, height)]


def quantise(weight: np.ndarray, bits: int, block: int) -> Codes:
    """Symmetric codes: nearest for 8 bits; for 4 bits the scale of least squared error is sought.

    Args:
        weight: (out, in) float16 or float32.
        bits: 4 or 8.
        block: input channels under one scale; it divides in.
    """
    rows, columns = weight.shape
    codes = np.empty((rows, columns), np.int8)
    scale = np.empty((rows, columns // block), np.float16)
    for part in chunks(rows, columns):
        values = weight[part].astype(np.float32).reshape(-1, columns // block, block)
        steps = _best_scale(values, bits) if bits == 4 else _full_scale(values, bits)
        codes[part] = _nearest(values, steps, bits).reshape(-1, columns)
        scale[part] = steps[..., 0]
    return Codes(codes=codes, bits=bits, scale=scale)


def _full_scale(values: np.ndarray, bits: int) -> np.ndarray:
    """(r, blocks, 1) float32, all float16 numbers: the largest weight takes the largest code."""
    top = np.float32(2 ** (bits - 1) - 1)
    largest = np.maximum(values.max(axis=-1, keepdims=True), -values.min(axis=-1, keepdims=True))
    scale = (largest / top).astype(np.float16)
    clipped = scale.astype(np.float32) * (top + np.float32(0.5)) < largest  # rounded down too far
    scale = np.where(clipped, np.nextafter(scale, np.float16(np.inf)), scale)
    return np.where(scale == 0, np.float32(1), scale.astype(np.float32))


def _nearest(values: np.ndarray, scale: np.ndarray, bits: int) -> np.ndarray:
    """Codes as float32."""
    top = 2 ** (bits - 1) - 1
    low = -top if bits == 8 else -top - 1
    codes = np.rint(values / scale)
    return np.clip(codes, low, top, out=codes)


def _squared_error(values: np.ndarray, codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    rest = codes * scale
    rest -= values
    return np.einsum("...i,...i->...", rest, rest)[..., None]


def _best_scale(values: np.ndarray, bits: int) -> np.ndarray:
    """The best of some clipping ranges, then the least-squares scale of its codes."""
    full = _full_scale(values, bits)
    best, least = full, np.full_like(full, np.inf)
    for shrink in _SHRINK:
        scale = _as_float16(full * np.float32(shrink), full)
        codes = _nearest(values, scale, bits)
        error = _squared_error(values, codes, scale)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    codes = _nearest(values, best, bits)
    power = np.einsum("...i,...i->...", codes, codes)[..., None]
    fitted = np.einsum("...i,...i->...", codes, values)[..., None] / np.maximum(power, 1)
    fitted = _as_float16(fitted, best)
    error = _squared_error(values, _nearest(values, fitted, bits), fitted)
    return np.where(error < least, fitted, best)


def _as_float16(scale: np.ndarray, instead: np.ndarray) -> np.ndarray:
    """Rounded to float16's numbers, in float32; ``instead`` where nothing is left."""
    rounded = scale.astype(np.float16).astype(np.float32)
    return np.where(rounded > 0, rounded, instead)


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """MLX's packed codes as numbers.

    Args:
        packed: (out, words) uint32: per row one stream of bits, lowest first.
        bits: of a code, 1 to 8.

    Returns:
        (out, in) uint8.
    """
    rows = packed.shape[0]
    octets = np.ascontiguousarray(packed).astype("<u4", copy=False).view(np.uint8)
    if bits == 8:
        return octets.reshape(rows, -1).copy()
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        return (octets[..., None] >> shifts & np.uint8(2**bits - 1)).reshape(rows, -1)
    weights = (1 << np.arange(bits)).astype(np.uint8)
    parts = []
    for part in chunks(rows, 8 * packed.shape[1]):
        stream = np.unpackbits(octets[part], axis=1, bitorder="little")
        parts.append(stream.reshape(stream.shape[0], -1, bits) @ weights)
    return np.concatenate(parts).astype(np.uint8, copy=False)


def carry(codes: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int) -> Codes:
    """MLX's affine codes in Core ML's form: every code kept, never quantised again.

    ``s q + b = s (q - z)`` with ``z = -b / s``. Codes are shifted by half their range; where ``s``
    is negative they are mirrored. The offset is an integer where each ``z`` is one, to a hundredth
    of a step and within the type; float16 otherwise.

    Args:
        codes: (out, in) uint8, below 2^bits.
        scales: (out, groups) float32.
        biases: (out, groups) float32.
        bits: 2 to 8.

    Raises:
        ValueError: if float16 scales and offsets cannot hold the matrix.
    """
    stored, top, half = (4 if bits <= 4 else 8), 2**bits - 1, 2 ** (bits - 1)
    groups = codes.reshape(*scales.shape, -1)
    signed = (groups - np.uint8(half)).view(np.int8)
    scale, bias = scales.astype(np.float64), biases.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        zero = np.where(bias == 0, 0.0, -bias / scale)
    mirrored = scale < 0  # s (q - z) = -s ((top - q) - (top - z)); of signed codes: -1 - q
    signed[mirrored] = -1 - signed[mirrored]
    scale, zero = np.abs(scale), np.where(mirrored, top - zero, zero) - half
    _restate_constant(signed, scale, zero, bias)
    return _with_offset(signed.reshape(codes.shape), scale, zero, stored, _widened(bits, stored))


def _widened(bits: int, stored: int) -> str:
    if bits == stored:
        return ""
    return f"{bits}-bit codes are stored in {stored} bits, the next width that Core ML's op knows"


def _restate_constant(
    signed: np.ndarray, scale: np.ndarray, zero: np.ndarray, bias: np.ndarray
) -> None:
    """Groups of one weight throughout, which MLX stores with a tiny scale or none: in place."""
    odd = ~(np.abs(zero) < 2.0**11) | (scale < 2.0**-14)
    block, step, offset = signed[odd], scale[odd], zero[odd]
    code = block[:, 0].copy()
    same = (block == code[:, None]).all(axis=1)
    with np.errstate(invalid="ignore"):
        value = np.where(step > 0, step * (code - offset), bias[odd])
    code = np.where((value > 0) == (code < 0), -1 - code, code)  # the offset stays in range
    block[same] = code[same, None]
    signed[odd] = block
    scale[odd] = np.where(same, np.abs(value), step)
    zero[odd] = np.where(same, code - np.sign(value), offset)


def _with_offset(
    codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, stored: int, note: str
) -> Codes:
    whole = np.rint(zero)
    limit = 2 ** (stored - 1)
    integer = (np.abs(zero - whole) <= _INTEGER) & (whole >= -limit) & (whole < limit)
    with np.errstate(over="ignore"):
        small = scale.astype(np.float16)
        offset = whole.astype(np.int8) if integer.all() else zero.astype(np.float16)
    if offset.dtype == np.float16:
        note = "; ".join(filter(None, [note, "offsets are float16: some are not integers"]))
    if _moved(scale, zero, small, offset, stored) > _SAID:
        note = "; ".join(filter(None, [note, _TINY]))
    result = Codes(codes=codes, bits=stored, scale=small, offset=offset, note=note)
    return result if offset.any() else replace(result, offset=None)


def _moved(
    scale: np.ndarray, zero: np.ndarray, small: np.ndarray, offset: np.ndarray, stored: int
) -> float:
    """How far float16 scales and offsets move a weight, in steps; 0 where float16 would anyhow.

    Raises:
        ValueError: if that is more than half a step.
    """
    reach = np.abs(zero) + 2 ** (stored - 1)  # of the farthest code from the offset, in steps
    with np.errstate(invalid="ignore", over="ignore"):
        moved = np.abs(small - scale) * reach + small * np.abs(offset - zero)
        largest = np.maximum(scale * reach, np.mean(scale * reach))  # at least a usual group's
        moved = np.where(moved <= _RELATIVE * largest, 0, moved)
        beyond = ~(moved <= _REFUSED * scale)
    if beyond.any():
        row, group = np.argwhere(beyond)[0]
        raise ValueError(
            f"group {group} of row {row} has scale {scale[row, group]:.3g} and offset "
            f"{zero[row, group]:.3g}, which float16 does not hold ({int(beyond.sum())} such "
            f"groups); {DEQUANTIZE}"
        )
    return float(np.max(moved / np.maximum(scale, 2.0**-149), initial=0))
