"""Log-likelihoods on disk as they are computed, so that interrupted tasks go on where they were.

One file of JSON lines beside the result: first whose answers these are, then a line an answer.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from openelm_mlx.scoring import Likelihood
from openelm_mlx.scoring_plan import Request

logger = logging.getLogger(__name__)


class AnswerMemory:
    """What a model was asked and answered; see :func:`openelm_mlx.scoring.log_likelihoods`.

    Args:
        path: the file; made with the first answer.
        work: hash of all settings that answers depend on; answers of other work are not used.
        key: hash of the weights; one file may hold the answers of several models.
    """

    def __init__(self, path: Path, *, work: str, key: str) -> None:
        self._path, self._work, self._key = path, work, key
        self._known = self._read()
        if self._known:
            logger.info("%s: %d answers are known already", path, len(self._known))

    def get(self, request: Request) -> Likelihood | None:
        """The answer to a request; None where it is not known."""
        return self._known.get(self._name(request))

    def put(self, answers: Sequence[tuple[Request, Likelihood]]) -> None:
        """Keep answers; after this they outlast the process."""
        lines = [] if self._path.is_file() else [json.dumps({"work": self._work})]
        for request, answer in answers:
            name = self._name(request)
            self._known[name] = answer
            lines.append(json.dumps([name, answer.logprob, answer.greedy]))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")

    def _name(self, request: Request) -> str:
        context, continuation = request
        text = json.dumps([self._key, list(context), list(continuation)])
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def _read(self) -> dict[str, Likelihood]:
        if not self._path.is_file():
            return {}
        try:
            first, *lines = self._path.read_text(encoding="utf-8").split("\n")
            header = json.loads(first)
            if isinstance(header, Mapping) and header.get("work") == self._work:
                return self._answers(first, lines)
        except ValueError:
            pass
        logger.warning("%s is of another evaluation; starting anew", self._path)
        self._path.unlink()
        return {}

    def _answers(self, first: str, lines: list[str]) -> dict[str, Likelihood]:
        """The answers of all lines but the last, which is empty, or was torn and is cut off."""
        if lines and lines[-1]:
            self._path.write_text("\n".join([first, *lines[:-1], ""]), encoding="utf-8")
        rows = [json.loads(line) for line in lines[:-1]]
        return {name: Likelihood(logprob, greedy) for name, logprob, greedy in rows}
