"""How tuning data are encoded and cut: samples, and pairs. Light, so that help is quick."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TuningArgs:
    """What the samples are, and which of their tokens are learned.

    Raises:
        ValueError: for values out of range and settings that cannot go together.
    """

    format: Literal["auto", "messages", "completions", "commonsense", "alpaca", "text"] = "auto"
    mask_prompt: bool = False  # learn the answers alone
    max_seq_length: int = 2048  # tokens that the model reads of one sample
    split_long: bool = False  # longer samples in pieces, in place of losing their ends
    long_prompts: Literal["skip", "cut"] = "skip"  # where no answer is left: skip, or cut the left
    use_chat_template: bool = False  # completions as a user's and an assistant's message
    fix_text: bool = False  # mend characters with ftfy, as CoreNet's tokenizer does
    share_rows: bool = True  # short samples share rows without seeing each other

    def __post_init__(self) -> None:
        if self.max_seq_length < 2:
            raise ValueError(f"max_seq_length must be at least 2, got {self.max_seq_length}")
        if self.long_prompts == "cut" and (self.split_long or not self.mask_prompt):
            raise ValueError(
                "long_prompts cut has an effect only with mask_prompt and without split_long"
            )


@dataclass(frozen=True, kw_only=True)
class PairArgs:
    """How pairs are encoded and cut.

    Raises:
        ValueError: for lengths that leave no room for an answer.
    """

    max_seq_length: int = 1024  # tokens of prompt and answer; longer answers lose their ends
    max_prompt_length: int = 512  # tokens of the prompt; longer ones lose their beginnings
    use_chat_template: bool = False  # prompts and answers of text as messages

    def __post_init__(self) -> None:
        if not 2 <= self.max_prompt_length < self.max_seq_length:
            raise ValueError(
                f"max_prompt_length {self.max_prompt_length} must be at least 2 and less than "
                f"max_seq_length {self.max_seq_length}, or no answer fits"
            )
