"""Clients of a Core ML package: token ids in, logits out, by the calling rule of its interface.

q tokens of one call, V vocabulary.  Each rule is what an app has to do; `OpenELMRunner.swift` does
the first. Knows no text, no MLX and not who computes: Core ML, or the evaluator of this project.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

PAD = 0  # any token will do: what it writes is never read
HIDDEN = -65504.0  # fp16's lowest, which swift-transformers' LanguageModel sends

Arrays = dict[str, np.ndarray]


class ContextFull(ValueError):
    """The tokens do not fit what is left of the package's context."""


class Predictor(Protocol):
    """Whoever runs the functions of a package: ``mil_eval.Package``, or Core ML itself."""

    def make_state(self, function: str | None = None) -> Any:
        """A fresh state, zeros; one serves all functions."""

    def predict(self, inputs: Arrays, state: Any = None, function: str | None = None) -> Arrays:
        """Outputs by name; ``state`` is changed in place."""


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What a package says of itself in its metadata.

    Attributes:
        interface: "static", "flexible", "stateless" or "ane".
        context: tokens that the cache holds.
        prefill: tokens of one prefill call.
        all_logits: whether every position's logits come back.
    """

    interface: str
    context: int
    prefill: int
    all_logits: bool = False

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> "Contract":
        """Read the ``openelm.*`` keys.

        Raises:
            ValueError: if they are missing or hold something else.
        """
        try:
            interface = metadata["openelm.interface"]
            contract = cls(
                interface=interface,
                context=int(metadata["openelm.context"]),
                prefill=int(metadata["openelm.prefill"]),
                all_logits=metadata.get("openelm.all_logits") == "true" or interface in _EVERY_ROW,
            )
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"the package's metadata does not say how to call it ({error}); export it with "
                "`openelm convert coreml`"
            ) from error
        if interface not in CLIENTS:
            raise ValueError(
                f"the package's interface is {interface!r}; known are {', '.join(CLIENTS)}"
            )
        return contract


class Client(ABC):
    """One sequence of tokens going through a package.

    Args:
        package: runs the functions.
        contract: how the package is to be called.
        cache_shape: of each cache, where the caller holds them ("stateless").

    Attributes:
        tokens: all ids fed since the last reset.
    """

    def __init__(
        self, package: Predictor, contract: Contract, *, cache_shape: Sequence[int] | None = None
    ) -> None:
        self.package, self.contract, self.cache_shape = package, contract, cache_shape
        self.reset()

    def reset(self) -> None:
        """Begin a new sequence."""
        self.tokens: list[int] = []
        self.state = self._new_state()

    @property
    def position(self) -> int:
        """Tokens in the cache: the index of the next one."""
        return len(self.tokens)

    def feed(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens; the (V,) float32 logits after the last of them.

        Raises:
            ContextFull: if they do not fit; nothing is fed then.
            ValueError: for no token.
        """
        return self._feed(ids)[-1]

    def feed_all(self, ids: Sequence[int]) -> np.ndarray:
        """Append n tokens; the (n, V) float32 logits after each of them.

        Raises:
            ContextFull: as :meth:`feed`.
            ValueError: for no token, or where the package gives the last position's logits only.
        """
        if not self.contract.all_logits:
            raise ValueError(
                "the package gives the logits of the last token only; export it with --all-logits, "
                "or feed one token at a time"
            )
        return self._feed(ids)

    def _feed(self, ids: Sequence[int]) -> np.ndarray:
        count, room = len(ids), self.contract.context - self.position
        if not count:
            raise ValueError("there is no token to feed; give at least one")
        if count > room:
            raise ContextFull(
                f"{count} tokens do not fit: {self.position} of the package's context of "
                f"{self.contract.context} are used; shorten the text, or export with a larger "
                "--context"
            )
        start = self.position
        self.tokens.extend(int(i) for i in ids)
        try:
            return self._forward(start)
        except BaseException:
            del self.tokens[start:]
            raise

    @abstractmethod
    def _forward(self, start: int) -> np.ndarray:
        """Run ``tokens[start:]``; (rows, V) logits of which the last row is the last token's."""

    def _new_state(self) -> Any:
        return self.package.make_state()


class StaticClient(Client):
    """Functions ``prefill`` (q = N) and ``decode`` (q = 1), told the position of their first token.

    All but the last token go through ``prefill``. The last chunk is padded: what pads write is
    overwritten before it is read. Near the end of the context, where pads would not fit, the chunk
    begins earlier instead and computes some tokens again.
    """

    def _forward(self, start: int) -> np.ndarray:
        q, last = self.contract.prefill, self.position - 1
        rows = []
        at = start
        while at < last:
            first = min(at, self.contract.context - q)
            ids = self.tokens[first : min(first + q, last)]
            logits = self._call("prefill", ids + [PAD] * (q - len(ids)), first)
            rows.append(logits[at - first : len(ids)])
            at = first + len(ids)
        decoded = self._call("decode", self.tokens[last:], last)
        return np.concatenate([*rows, decoded]) if self.contract.all_logits else decoded

    def _call(self, function: str, ids: list[int], position: int) -> np.ndarray:
        return _rows(self.package.predict(_inputs(ids, position), self.state, function))


class StatelessClient(StaticClient):
    """As :class:`StaticClient`, the caches being inputs and outputs that the caller passes on."""

    def _call(self, function: str, ids: list[int], position: int) -> np.ndarray:
        outputs = self.package.predict({**_inputs(ids, position), **self.state}, None, function)
        self.state = {
            "keyCache": outputs["newKeyCache"],
            "valueCache": outputs["newValueCache"],
        }
        return _rows(outputs)

    def _new_state(self) -> Arrays:
        if self.cache_shape is None:
            raise ValueError("a stateless package's client needs the shape of its caches")
        return {
            name: np.zeros(tuple(self.cache_shape), np.float16)
            for name in ("keyCache", "valueCache")
        }


class FlexibleClient(Client):
    """One function of any length, called as swift-transformers' ``LanguageModel`` calls it.

    The whole prompt in one call, then the newest token alone; an additive causal mask over all
    tokens so far; the last row of the logits counts.
    Source: huggingface/swift-transformers ``Sources/Models/LanguageModel.swift`` at 0244ff3.
    """

    def _forward(self, start: int) -> np.ndarray:
        ids, total = self.tokens[start:], self.position
        hidden = np.arange(total)[None] > np.arange(start, total)[:, None]  # (q, total)
        inputs: Arrays = {
            "inputIds": np.array([ids], np.int32),
            "fullAttentionMask": np.where(hidden, HIDDEN, 0.0).astype(np.float16)[None, None],
        }
        return _rows(self.package.predict(inputs, self.state))


class AneClient(Client):
    """One function of a fixed length whose masks the host makes, as seen on the Neural Engine.

    Column j of ``update_mask`` has its 1 in the row where token j is written; a pad's column is
    empty, so that it writes nothing and needs no room.
    """

    def _forward(self, start: int) -> np.ndarray:
        q = self.contract.prefill
        rows = []
        for first in range(start, self.position, q):
            ids = self.tokens[first : first + q]
            logits = self._call(ids + [PAD] * (q - len(ids)), first, len(ids))
            rows.append(logits[: len(ids)])
        return np.concatenate(rows)

    def _call(self, ids: list[int], first: int, count: int) -> np.ndarray:
        q, context = self.contract.prefill, self.contract.context
        hidden = np.arange(context)[None] > np.arange(first, first + q)[:, None]  # (q, context)
        update = np.zeros((1, 1, context, q), np.float16)
        update[0, 0, np.arange(first, first + count), np.arange(count)] = 1
        inputs: Arrays = {
            "inputIds": np.array([ids], np.int32),
            "attn_mask": np.where(hidden, HIDDEN, 0.0).astype(np.float16)[None, None],
            "update_mask": update,
        }
        return _rows(self.package.predict(inputs, self.state))


CLIENTS: dict[str, type[Client]] = {
    "static": StaticClient,
    "flexible": FlexibleClient,
    "stateless": StatelessClient,
    "ane": AneClient,
}
_EVERY_ROW = ("flexible", "ane")  # interfaces that give all logits whatever was asked


def _inputs(ids: list[int], position: int) -> Arrays:
    return {"inputIds": np.array([ids], np.int32), "position": np.array([position], np.int32)}


def _rows(outputs: Arrays) -> np.ndarray:
    """(1, rows, V) logits as (rows, V) float32."""
    return np.asarray(outputs["logits"], dtype=np.float32)[0]
