"""A package as Core ML would run it, made of the MLX model: fixed caches that begin full of junk.

Judges the clients of ``convert.coreml_client`` before and beside real packages.
"""

from typing import Any

import golden_set  # noqa: F401  # imports openelm_mlx, so that OpenBLAS comes before mlx.core
import mlx.core as mx
import numpy as np

from convert.coreml_client import CLIENTS, Client, Contract
from openelm_mlx.model import Model

JUNK = 37.0  # in caches where nothing was written: read, it shows in the logits


class _Buffers:
    """One layer's slice of the packed caches, (1, K, C, E) each."""

    def __init__(self, package: "FakePackage", low: int, high: int) -> None:
        self.package, self.heads = package, slice(low, high)
        self.offset = package.position

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        found = []
        for name, new in (("keyCache", keys), ("valueCache", values)):
            cache = self.package.caches[name][:, self.heads]
            self.package.write(cache, np.array(new))
            found.append(mx.array(cache[:, :, : self.package.total]))
        return found[0], found[1]

    def make_mask(self, num_tokens: int, **_: Any) -> mx.array:
        return self.package.mask


class FakePackage:
    """Runs ``model`` by the contract of one interface, in float32."""

    def __init__(
        self, model: Model, interface: str, *, context: int, prefill: int, all_logits: bool = False
    ) -> None:
        self.model, self.context = model, context
        self.contract = Contract(
            interface=interface,
            context=context,
            prefill=prefill,
            all_logits=all_logits or interface in ("flexible", "ane"),
        )
        heads = model.args.num_kv_heads
        self.ends = np.cumsum([0, *heads]).tolist()
        self.cache_shape = (1, sum(heads), context, model.args.head_dim)
        self.calls: list[tuple[str | None, int, int]] = []  # function, tokens, position

    def client(self) -> Client:
        return CLIENTS[self.contract.interface](self, self.contract, cache_shape=self.cache_shape)

    def make_state(self, function: str | None = None) -> dict[str, np.ndarray]:
        return {n: np.full(self.cache_shape, JUNK, np.float32) for n in ("keyCache", "valueCache")}

    def predict(
        self, inputs: dict[str, np.ndarray], state: Any = None, function: str | None = None
    ) -> dict[str, np.ndarray]:
        ids, interface = inputs["inputIds"], self.contract.interface
        assert ids.dtype == np.int32
        q = ids.shape[1]
        self.function, self.update = function, inputs.get("update_mask")
        self._place(inputs, q)
        self.calls.append((function, q, self.position))
        self.caches = state
        if interface == "stateless":
            assert state is None
            self.caches = {n: inputs[n].astype(np.float32) for n in ("keyCache", "valueCache")}
        layers = zip(self.ends[:-1], self.ends[1:], strict=True)
        logits = np.array(self.model(mx.array(ids), [_Buffers(self, *pair) for pair in layers]))
        outputs = {"logits": logits if self.contract.all_logits else logits[:, -1:]}
        if interface == "stateless":
            outputs |= {f"new{n[0].upper()}{n[1:]}": c for n, c in self.caches.items()}
        return outputs

    def _place(self, inputs: dict[str, np.ndarray], q: int) -> None:
        """Where the tokens go and what they see, refusing what the real package would."""
        self.total = self.context
        interface = self.contract.interface
        if interface == "flexible":
            mask = inputs["fullAttentionMask"]
            self.total = mask.shape[3]
            self.position = self.total - q
            assert mask.shape == (1, 1, q, self.total)
            self.mask = self._additive(mask)
        elif interface == "ane":
            assert q == self.contract.prefill
            self.position = int(self.update[0, 0, :, 0].argmax())
            assert self.update.shape == (1, 1, self.context, q)
            assert inputs["attn_mask"].shape == (1, 1, q, self.context)
            self.mask = self._additive(inputs["attn_mask"])
        else:
            assert q == {"prefill": self.contract.prefill, "decode": 1}[str(self.function)]
            self.position = int(inputs["position"][0])
            assert inputs["position"].dtype == np.int32
            assert inputs["position"].shape == (1,)
            seen = np.arange(self.context)[None] <= self.position + np.arange(q)[:, None]
            self.mask = mx.array(seen)
        assert self.position >= 0
        assert self.position + (1 if interface == "ane" else q) <= self.context

    @staticmethod
    def _additive(mask: np.ndarray) -> mx.array:
        assert mask.dtype == np.float16
        assert np.isfinite(mask).all()
        return mx.array(mask.astype(np.float32))

    def write(self, cache: np.ndarray, new: np.ndarray) -> None:
        """(1, K, q, E) into (1, K, C, E), in place."""
        if self.update is None:
            cache[:, :, self.position : self.position + new.shape[2]] = new
            return
        update = self.update.astype(np.float32)
        cache[...] = cache * (1 - update.sum(axis=3, keepdims=True)) + update @ new
