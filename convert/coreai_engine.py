"""Apple's Core AI runtime around one asset: a process of its own, fed through its standard input.

``python -m convert.coreai_engine ASSET CONTEXT`` answers requests of
:class:`convert.coreai_runner.Runner`. The runtime ends its process where others raise, and was
once seen to abort after its last result; so nobody else's process is put at risk.
T new tokens, S cached + new, R room in the cache, V vocabulary.
"""

import asyncio
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np

from convert.coreai_api import authoring

FIRST_ROOM = 256  # tokens; the room doubles when it is full, as in Apple's Swift package


class Engine:
    """An asset, loaded and compiled, with its cache.

    Args:
        asset: a folder ``*.aimodel``.
        context: tokens that the cache may hold at most.
    """

    def __init__(self, asset: Path, context: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self._context, self._seen = context, 0
        loading = authoring().AIModelAsset.load(asset).executable()
        from coreai.runtime import NDArray

        self._array: Callable[[np.ndarray], Any] = NDArray
        model = self._loop.run_until_complete(self._stack.enter_async_context(loading))
        self._function = model.load_function("main")
        self._caches: dict[str, Any] = {}  # the runtime's arrays, which it changes in place
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        self._seen = 0
        describe = self._function.desc.state_descriptor
        for name in self._function.desc.state_names:
            shape = [min(FIRST_ROOM, self._context) if n < 0 else n for n in describe(name).shape]
            self._caches[name] = self._array(np.zeros(shape, describe(name).dtype))

    def step(self, ids: np.ndarray) -> np.ndarray:
        """Run T tokens.

        Args:
            ids: (T,) int32.

        Returns:
            (T, V) logits in the asset's type.

        Raises:
            ValueError: if the cache cannot hold them; the runtime would write somewhere else.
        """
        total = self._seen + len(ids)
        if total > self._context:
            raise ValueError(
                f"{total} tokens do not fit the model's context of {self._context}: start anew, or "
                "give fewer"
            )
        self._make_room(total)
        logits = self._loop.run_until_complete(self._run(ids, total))
        self._seen = total
        return logits

    def close(self) -> None:
        """Unload, which deletes the runtime's temporary files."""
        self._loop.run_until_complete(self._stack.aclose())

    async def _run(self, ids: np.ndarray, total: int) -> np.ndarray:
        inputs = {"input_ids": ids, "position_ids": np.arange(total, dtype=np.int32)}
        results = await self._function(
            inputs={name: self._array(array[None]) for name, array in inputs.items()},
            state=self._caches,
        )
        return np.array(results["logits"].numpy()[0])

    def _make_room(self, tokens: int) -> None:
        for name, array in self._caches.items():
            room = array.shape[3]
            while room < tokens:
                room = min(2 * room, self._context)
            if room > array.shape[3]:
                cache = array.numpy()
                grown = np.zeros((*cache.shape[:3], room, cache.shape[4]), cache.dtype)
                grown[:, :, :, : cache.shape[3]] = cache
                self._caches[name] = self._array(grown)


def serve(asset: Path, context: int) -> None:
    """Answer pickled requests until standard input ends.

    A request is None (reset) or (T,) int32; the answer None, the logits, or an error.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the runtime prints

    def answer(what: Any) -> None:
        pickle.dump(what, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()

    try:
        engine = Engine(asset, context)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        answer(_plain(error))
        return
    answer(None)
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        try:
            if request is None:
                engine.reset()
                answer(None)
            else:
                answer(engine.step(request))
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            answer(_plain(error))
    engine.close()


def _plain(error: Exception) -> Exception:
    """An error that any process can read: the runtime's own become RuntimeError."""
    own = type(error) in (ImportError, ValueError)
    text = " ".join(str(error).split())
    return type(error)(text) if own else RuntimeError(f"Core AI: {type(error).__name__}: {text}")


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
