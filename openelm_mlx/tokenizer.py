"""Text <-> token ids, incremental decoding, chats: the public names of the tokenizer modules.

``tokenizer_codec`` holds the class, ``tokenizer_search`` finds a model's tokenizer,
``detokenizer`` streams text and ``chat_template`` has Apple's instruct format.
"""

from openelm_mlx.chat_template import APPLE_INSTRUCT_TEMPLATE, is_instruct
from openelm_mlx.detokenizer import Detokenizer, StopMatcher
from openelm_mlx.tokenizer_codec import Tokenizer
from openelm_mlx.tokenizer_search import check_tokenizer, load_tokenizer

__all__ = [
    "APPLE_INSTRUCT_TEMPLATE",
    "Detokenizer",
    "StopMatcher",
    "Tokenizer",
    "check_tokenizer",
    "is_instruct",
    "load_tokenizer",
]
