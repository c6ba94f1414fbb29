"""English text that every Python installation has: its language reference and its docstrings.

For runs that need real text and no network: the demo and a test. Sources are read as text and
never imported; the order depends on the Python version alone. Knows no tokens.
``python -m openelm_mlx.python_text DIR`` writes them as the training commands read them.
"""

import argparse
import ast
import inspect
import json
import random
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

_SKIPPED = {"encodings", "idlelib", "lib2to3", "pydoc_data", "test", "tests", "turtledemo"}
_PIECE = 800  # characters from which on a piece of the reference ends with its paragraph
_ANSWER = range(24, 161)  # characters of an answer
_EVERY = 12  # one of so many records is not trained on
_PUBLIC_NAMES = {"posixpath": "os.path"}  # files whose contents are known under another name


@dataclass(frozen=True, kw_only=True)
class Docstring:
    """What the source says of one thing.

    Attributes:
        name: ``os.path.join``.
        kind: ``module``, ``class`` or ``function``.
        text: the docstring, its indentation taken off.
    """

    name: str
    kind: str
    text: str


def documents() -> Iterator[str]:
    """Texts to train on: pieces of the language reference, then docstrings under their names.

    Short, so that shuffled they mix. No text comes twice.

    Raises:
        FileNotFoundError: where the installation has no sources.
    """
    yield from dict.fromkeys(piece for topic in _topics() for piece in _pieces(topic))
    yield from (f"{found.name}\n{found.text}" for found in docstrings())


def question_answers() -> Iterator[dict[str, str]]:
    """Records with ``prompt`` and ``completion``, made from the docstrings of public functions.

    The completion is the docstring's first sentence. No prompt and no completion comes twice.

    Raises:
        FileNotFoundError: where the installation has no sources.
    """
    prompts, answers = set[str](), set[str]()
    for found in docstrings():
        prompt = f"What does {found.name} do?"
        answer = first_sentence(found.text)
        private = any(part.startswith("_") for part in found.name.split("."))
        if found.kind != "function" or private or len(answer) not in _ANSWER:
            continue
        if prompt not in prompts and answer not in answers:
            prompts.add(prompt)
            answers.add(answer)
            yield {"prompt": prompt, "completion": answer}


def preferences() -> Iterator[dict[str, str]]:
    """Records with ``prompt``, ``chosen`` and ``rejected``: a true answer, and its words shuffled.

    Answers of fewer than five different words are left out.

    Raises:
        FileNotFoundError: where the installation has no sources.
    """
    rng = random.Random(0)
    for record in question_answers():
        words = record["completion"].split()
        if len(set(words)) < 5:
            continue
        shuffled = words[:]
        while shuffled == words:
            rng.shuffle(shuffled)
        yield {
            "prompt": record["prompt"],
            "chosen": record["completion"],
            "rejected": " ".join(shuffled),
        }


def write_all(folder: str | Path, *, limit: int | None = None) -> dict[str, int]:
    """Write ``text`` and ``questions``, each with train and valid; files there are replaced.

    ``text/questions.jsonl`` holds the questions of the validation part with their answers, as text.

    Args:
        folder: made where it is missing.
        limit: documents and questions at most; None takes all.

    Returns:
        How many documents and questions there are.

    Raises:
        FileNotFoundError: where the installation has no sources.
    """
    folder = Path(folder)
    texts = list(islice(documents(), limit))
    asked = list(islice(question_answers(), limit))
    write_split(folder / "text", ({"text": text} for text in texts), every=100)
    write_split(folder / "questions", asked)
    lines = [
        json.dumps({"text": f"{q['prompt']} {q['completion']}"}) + "\n" for q in asked[::_EVERY]
    ]
    (folder / "text" / "questions.jsonl").write_text("".join(lines), encoding="utf-8")
    return {"documents": len(texts), "questions": len(asked)}


def write_split(
    folder: str | Path, records: Iterable[Mapping[str, str]], *, every: int = _EVERY
) -> Path:
    """Write records as a folder that the training commands read.

    Args:
        folder: made where it is missing.
        records: JSON objects; a text is ``{"text": text}``.
        every: one of so many records goes to ``valid.jsonl``, the others to ``train.jsonl``.

    Returns:
        The folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) + "\n" for record in records]
    train = "".join(line for i, line in enumerate(lines) if i % every)
    (folder / "train.jsonl").write_text(train, encoding="utf-8")
    (folder / "valid.jsonl").write_text("".join(lines[::every]), encoding="utf-8")
    return folder


def first_sentence(text: str) -> str:
    """The first sentence of a docstring in one line; empty where it does not end in a full stop."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    sentence, stop, _ = f"{paragraph} ".partition(". ")
    return f"{sentence}." if stop else ""


@cache
def docstrings() -> tuple[Docstring, ...]:
    """Every docstring of the standard library, each text once; a module first, then its parts.

    Raises:
        FileNotFoundError: where the installation has no sources.
    """
    seen, found = set[str](), list[Docstring]()
    for path in _sources():
        for item in _docstrings_of(path):
            if item.text and item.text not in seen:
                seen.add(item.text)
                found.append(item)
    return tuple(found)


def _library() -> Path:
    folder = Path(sysconfig.get_path("stdlib"))
    if not (folder / "os.py").is_file():
        raise FileNotFoundError(
            f"{folder} holds no sources of Python's standard library; use a Python that has them"
        )
    return folder


def _sources() -> Iterator[Path]:
    """Files of the standard library's modules, in order of their names."""
    folder = _library()
    known = sys.stdlib_module_names - _SKIPPED
    tops = [path for path in folder.iterdir() if path.stem in known]  # not site-packages
    files = [path for path in tops if path.suffix == ".py"]
    files += [path for top in tops if top.is_dir() for path in top.rglob("*.py")]
    for path in sorted(files):
        if not _SKIPPED.intersection(path.relative_to(folder).parts):
            yield path


def _parsed(path: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in the library's own strings
        return ast.parse(path.read_bytes())


def _docstrings_of(path: Path) -> Iterator[Docstring]:
    name = ".".join(path.relative_to(_library()).with_suffix("").parts)
    name = name.removesuffix(".__init__")
    name = _PUBLIC_NAMES.get(name, name)
    try:
        tree = _parsed(path)
    except (SyntaxError, ValueError):  # templates, and files that are broken on purpose
        return
    yield Docstring(name=name, kind="module", text=_text(tree))
    yield from _members(tree, name)


def _members(node: ast.Module | ast.ClassDef, name: str) -> Iterator[Docstring]:
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            own = f"{name}.{child.name}"
            yield Docstring(name=own, kind="class", text=_text(child))
            yield from _members(child, own)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Docstring(name=f"{name}.{child.name}", kind="function", text=_text(child))


def _text(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    text = ast.get_docstring(node, clean=False) or ""
    return inspect.cleandoc(text).strip().encode("utf-8", "ignore").decode()


def _pieces(text: str) -> Iterator[str]:
    """The text cut between paragraphs."""
    piece = ""
    for paragraph in text.split("\n\n"):
        piece += f"{paragraph}\n\n"
        if len(piece) >= _PIECE:
            yield piece.strip("\n")
            piece = ""
    if piece.strip():
        yield piece.strip("\n")


def _topics() -> Iterator[str]:
    """Texts of ``help()``'s topics; none where the installation has left them out."""
    path = _library() / "pydoc_data" / "topics.py"
    if not path.is_file():
        return
    for node in _parsed(path).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for value in node.value.values:
                text = ast.literal_eval(value)
                if isinstance(text, str) and text.strip():
                    yield text.strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Write the text of this Python; see :func:`write_all`."""
    parser = argparse.ArgumentParser(prog="python -m openelm_mlx.python_text", description=__doc__)
    parser.add_argument("folder", metavar="DIR", help="folder to write into")
    parser.add_argument("--limit", type=int, metavar="N", help="documents and questions at most")
    args = parser.parse_args(argv)
    made = write_all(args.folder, limit=args.limit)
    sys.stdout.write(
        f"{args.folder}: {made['documents']:,} texts, {made['questions']:,} questions\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
