"""A SentencePiece tokenizer like LLaMA's, trained in a moment from sentences made here."""

import io
import random
from dataclasses import dataclass
from pathlib import Path

from openelm_mlx.tokenizer import Tokenizer

VOCAB_SIZE = 320  # 3 special pieces, 256 bytes, the rest letters and words
_TEXT = """the a an old young king queen went to forest and saw wolf house little girl boy river
    over under with red blue said that was once upon time there you they his her what is"""


@dataclass(frozen=True)
class TinyTokenizer:
    """The file and the tokenizer loaded from it."""

    path: Path
    tokenizer: Tokenizer


def sentences(count: int = 500, seed: int = 0) -> list[str]:
    """Sentences of a few dozen words, always the same ones for a seed."""
    rng, words = random.Random(seed), _TEXT.split()
    return [
        " ".join(rng.choices(words, k=rng.randint(4, 12))).capitalize() + rng.choice(".!?")
        for _ in range(count)
    ]


def train(path: Path, **settings: object) -> Path:
    """Write a ``tokenizer.model``: BPE, byte fallback, unk 0, bos 1, eos 2, no pad."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    llama = {
        **{"model_type": "bpe", "vocab_size": VOCAB_SIZE, "byte_fallback": True},
        **{"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        **{"split_digits": True, "allow_whitespace_only_pieces": True},
        **{"character_coverage": 1.0, "num_threads": 1, "minloglevel": 2},
    }
    SentencePieceTrainer.train(
        sentence_iterator=iter(sentences()), model_writer=model, **{**llama, **settings}
    )
    path.write_bytes(model.getvalue())
    return path


def train_byte_level(folder: Path, *, added: str = "<|extra|>") -> Path:
    """Write a ``tokenizer.json`` like GPT-2's, with a special token added after the vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(sentences(), trainer)
    fast.add_special_tokens([AddedToken(added, normalized=False)])
    fast.enable_truncation(max_length=4)  # must not reach us
    folder.mkdir(exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
