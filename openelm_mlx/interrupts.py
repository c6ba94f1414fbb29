"""Ctrl-C and SIGTERM while a step is under way: noted, so that the step can finish."""

import logging
import signal
from typing import Any

logger = logging.getLogger(__name__)


class NotedSignals:
    """Collect Ctrl-C and SIGTERM while a step finishes; a second one interrupts at once."""

    def __init__(self, seen: list[int]) -> None:
        self._seen = seen
        self._saved: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._saved[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: its owner handles signals
                return

    def __exit__(self, *_: object) -> None:
        for number, handler in self._saved.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: Any) -> None:
        if self._seen:
            raise KeyboardInterrupt
        self._seen.append(number)
        logger.warning("stopping after this step; once more stops at once")
