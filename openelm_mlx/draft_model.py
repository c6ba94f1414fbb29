"""A draft model has to read and write the ids of the model that it drafts for."""

from typing import TYPE_CHECKING

from openelm_mlx.model import Model

if TYPE_CHECKING:
    from openelm_mlx.tokenizer import Tokenizer

# Words, digits, signs and bytes: tokenizers that agree on it are taken to be one.
_SAMPLE = "Once upon a time the 3 kings said: \u201cYes\u201d, 42 \U0001f600 laughed.\n\tThe end"


def check_vocabulary(own: int, draft: int) -> None:
    """Refuse a draft model whose ids cannot mean the same.

    Args:
        own: vocabulary size of the model.
        draft: that of the draft model.

    Raises:
        ValueError: naming both, if they differ.
    """
    if own != draft:
        raise ValueError(
            f"the draft model's vocabulary has {draft} tokens and the model's {own}; a draft "
            "model needs the same tokenizer"
        )


def load_draft(path_or_repo: str, model: Model, tokenizer: "Tokenizer") -> Model:
    """Load a draft model and check that its ids mean what the model's do.

    Args:
        path_or_repo: folder or Hub id of the draft model.
        model: that it is to draft for.
        tokenizer: of ``model``.

    Raises:
        ValueError: if the vocabularies differ in size, or the two tokenizers in their ids.
    """
    from openelm_mlx.checkpoint import load_args, load_model
    from openelm_mlx.hub import local_or_download
    from openelm_mlx.tokenizer import Tokenizer
    from openelm_mlx.tokenizer_files import has_tokenizer

    folder = local_or_download(path_or_repo)
    check_vocabulary(model.args.vocab_size, load_args(folder).vocab_size)
    if has_tokenizer(folder):
        other = Tokenizer.from_path(folder)
        if other.encode(_SAMPLE) != tokenizer.encode(_SAMPLE):
            raise ValueError(
                f"the draft model's tokenizer {other.source} gives other ids than "
                f"{tokenizer.source}; a draft model needs the same tokenizer"
            )
    return load_model(folder)
