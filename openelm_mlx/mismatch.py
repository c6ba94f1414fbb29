"""Do the tensors of a file fit a model? One short message for all that does not.

Counts, the first names, the nearest matches and both shapes, in place of a wall of names.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

_SHOWN = 3

Shapes = Mapping[str, Sequence[int]]


def check_tensors(expected: Shapes, found: Shapes, *, source: str) -> None:
    """Compare names and shapes.

    Args:
        expected: the model's parameters, name -> shape.
        found: the file's tensors, name -> shape.
        source: file or folder, for the message.

    Raises:
        ValueError: one line with every kind of mismatch, counted, the first few named.
    """
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    wrong = [n for n in expected if n in found and tuple(expected[n]) != tuple(found[n])]
    if not (missing or extra or wrong):
        return
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing: {_names(missing, extra)}")
    if extra:
        parts.append(f"{len(extra)} unexpected: {_names(extra, [])}")
    if wrong:
        shown = [f"{n} is {list(found[n])}, expected {list(expected[n])}" for n in wrong[:_SHOWN]]
        parts.append(f"{len(wrong)} of another shape: " + ", ".join(shown) + _more(wrong))
    raise ValueError(
        f"{source}: tensors do not fit the config ({len(expected)} expected, {len(found)} found): "
        + "; ".join(parts)
    )


def _names(names: list[str], candidates: list[str]) -> str:
    shown = []
    for name in names[:_SHOWN]:
        near = get_close_matches(name, candidates, n=1, cutoff=0.8)
        shown.append(f"{name} (nearest in the file: {near[0]})" if near else name)
    return ", ".join(shown) + _more(names)


def _more(names: list[str]) -> str:
    return f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
