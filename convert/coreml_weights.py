"""Which form a weight matrix takes in a Core ML package, and whether the package shrank by it."""

from pathlib import Path

import mlx.core as mx
import numpy as np

from convert.coreml_codes import DEQUANTIZE, INT4_BLOCK, carry, quantise, unpack
from convert.coreml_palette import GROUP, Palettes, palettise
from convert.coreml_stored import Affine, Dense, Palette, StoredWeight

__all__ = [
    "KINDS",
    "Affine",
    "Dense",
    "Palette",
    "StoredWeight",
    "check_shrunk",
    "from_mlx",
    "store",
]

KINDS = ("fp16", "int8", "int4", "palette4", "palette6")
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
_TWO_BITS = "2-bit codes are indices into a palette of 4 values for each group"
_SLACK = 0.02  # of the expected bytes, and
_SLACK_BYTES = 1 << 16  # headers and alignment of the blob's entries


def store(weight: np.ndarray, kind: str) -> StoredWeight:
    """Choose how a matrix is stored.

    Args:
        weight: (out, in) float16 or float32.
        kind: ``fp16``; ``int8``, a scale for each output channel; ``int4``, a scale for each block
            of 32 input channels; ``palette4`` or ``palette6``, 16 or 64 values for each group of
            16 output channels. Where 32 or 16 does not divide, the largest number below that
            does; `StoredWeight.note` says so.

    Raises:
        ValueError: if the kind is unknown, or the weights are no matrix or not finite in float16.
    """
    if kind not in KINDS:
        raise ValueError(f"weights are stored as one of {', '.join(KINDS)}, not {kind!r}")
    half, (rows, columns) = _as_float16(weight), weight.shape
    if kind == "fp16":
        return Dense(values=half)
    if kind == "int8":
        return Affine(stored=quantise(weight, 8, columns))
    if kind == "int4":
        block, note = _dividing(columns, INT4_BLOCK, "int4 blocks of {} input channels")
        return Affine(stored=quantise(weight, 4, block), note=note)
    group, note = _dividing(rows, GROUP, "palettes for {} output channels each")
    return Palette(stored=palettise(half, int(kind.removeprefix("palette")), group), note=note)


def _as_float16(weight: np.ndarray) -> np.ndarray:
    if weight.ndim != 2 or weight.dtype not in (np.float16, np.float32):
        raise ValueError(
            f"a weight must be a float16 or float32 matrix, got {weight.dtype} of shape "
            f"{weight.shape}; convert it first"
        )
    return _rounded(weight)


def _rounded(weight: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        half = weight.astype(np.float16, copy=False)
    if not np.isfinite(half).all():
        raise ValueError(
            f"a weight of {float(np.abs(weight).max()):.4g} does not fit float16 (largest 65504), "
            "which Core ML stores; the checkpoint may be damaged"
        )
    return half


def _dividing(size: int, block: int, meaning: str) -> tuple[int, str]:
    """The largest block up to the one asked that divides, or all where that is under 4; a note."""
    best = max(n for n in range(1, min(block, size) + 1) if size % n == 0)
    best = best if best >= 4 else size
    return best, "" if best == block else f"{meaning.format(best)}: {block} does not divide {size}"


def from_mlx(
    codes: np.ndarray | mx.array,
    scales: np.ndarray | mx.array,
    biases: np.ndarray | mx.array,
    bits: int,
    group_size: int,
) -> StoredWeight:
    """A matrix quantised by MLX in its affine mode: its codes are kept as they are.

    Args:
        codes: (out, in x bits / 32) uint32, packed as ``mx.quantize`` does.
        scales: (out, in / group_size), any float type.
        biases: the same.
        bits: of a code: 2, 3, 4, 5, 6 or 8.
        group_size: input channels under one scale.

    Raises:
        ValueError: if the bits are not known, the shapes do not fit each other, or float16 cannot
            hold scales and offsets.
    """
    if bits not in AFFINE_BITS:
        raise ValueError(
            f"MLX codes of {bits} bits have no form in Core ML (known: "
            f"{', '.join(map(str, AFFINE_BITS))}); {DEQUANTIZE}"
        )
    packed, scale, bias = np.asarray(codes), _float32(scales), _float32(biases)
    columns = packed.shape[-1] * 32 // bits
    if (
        packed.dtype != np.uint32
        or scale.shape != (packed.shape[0], columns // group_size)
        or scale.shape != bias.shape
    ):
        raise ValueError(
            f"MLX codes {packed.shape} of {bits} bits in groups of {group_size} do not go with "
            f"scales {scale.shape} and biases {bias.shape}"
        )
    if bits == 2:  # a palette is smaller than codes of 4 bits, and holds s q + b itself
        return Palette(stored=_two_bits(unpack(packed, bits), scale, bias), note=_TWO_BITS)
    stored = carry(unpack(packed, bits), scale, bias, bits)
    return Affine(stored=stored, note=stored.note)


def _two_bits(codes: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> Palettes:
    exact = scale[..., None].astype(np.float64) * np.arange(4) + bias[..., None]
    return Palettes(indices=codes, bits=2, values=_rounded(exact))


def _float32(values: np.ndarray | mx.array) -> np.ndarray:
    """Bfloat16 has no NumPy type: MLX widens it first."""
    wide = values.astype(mx.float32) if isinstance(values, mx.array) else values
    return np.asarray(wide, dtype=np.float32)


def check_shrunk(package: Path | str | int, expected_bytes: int) -> None:
    """Refuse a package whose weights take more room than they were stored in.

    Args:
        package: an ``.mlpackage``, or the bytes of its weights.
        expected_bytes: the sum of ``nbytes`` and of all other constants.

    Raises:
        ValueError: if the weight files exceed what is expected by 2 % and 64 KiB.
    """
    found = package if isinstance(package, int) else _blob_bytes(Path(package))
    if found > expected_bytes * (1 + _SLACK) + _SLACK_BYTES:
        raise ValueError(
            f"the package's weights take {found / 1e6:.1f} MB where {expected_bytes / 1e6:.1f} MB "
            "were asked for: a matrix was stored twice or not compressed; report this as a bug"
        )


def _blob_bytes(package: Path) -> int:
    files = sorted(package.rglob("*.bin"))
    if not files:
        raise FileNotFoundError(f"{package} has no weight file (*.bin); is it an .mlpackage?")
    return sum(file.stat().st_size for file in files)
