"""What ``openelm evaluate`` is asked to measure: text, tasks, and how; light, so help is quick."""

from dataclasses import dataclass

SUITES = ("zero-shot", "openllm", "llm360", "commonsense")


@dataclass(frozen=True, kw_only=True)
class PerplexityArgs:
    """How text is scored.

    Raises:
        ValueError: listing what is out of range.
    """

    data: tuple[str, ...]  # files, folders and patterns; a .txt file is one document
    text_key: str = "text"  # of a record's text
    batch_size: int = 8  # windows a forward pass, fewer where they are long
    max_seq_length: int | None = None  # tokens of a window; default: the model's context
    stride: int | None = None  # tokens a window moves on; default: half of max_seq_length
    limit: int | None = None  # documents

    def __post_init__(self) -> None:
        problems = _below_one(self, "batch_size", "max_seq_length", "stride", "limit")
        if not self.data:
            problems.append("data must name at least one file")
        if self.stride and self.max_seq_length and self.stride > self.max_seq_length:
            problems.append(
                f"stride {self.stride} is more than max_seq_length {self.max_seq_length}, so that "
                "tokens would be left out"
            )
        if problems:
            raise ValueError("evaluate: " + "; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class TaskArgs:
    """Which tasks are scored, and how.

    Raises:
        ValueError: listing what is out of range.
    """

    suite: str | None = None  # one of SUITES
    tasks: tuple[str, ...] = ()  # names of lm-eval tasks, or YAML files of local ones
    data_dir: str | None = None  # of the commonsense suite: <task>/test.json
    num_fewshot: int | None = None  # in place of the task's own
    batch_size: int = 8  # sequences a forward pass
    max_seq_length: int | None = None  # default: the model's context
    limit: int | None = None  # items a task

    def __post_init__(self) -> None:
        problems = _below_one(self, "batch_size", "max_seq_length", "limit")
        if self.suite is not None and self.suite not in SUITES:
            problems.append(f"suite {self.suite!r} is not one of {', '.join(SUITES)}")
        if bool(self.suite) == bool(self.tasks):
            problems.append("give a suite or tasks")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            problems.append(f"num_fewshot must be 0 or more, got {self.num_fewshot}")
        if self.suite == "commonsense" and self.data_dir is None:
            problems.append("the commonsense suite needs --data-dir with <task>/test.json files")
        if self.data_dir is not None and self.suite != "commonsense":
            problems.append("only the commonsense suite reads --data-dir; leave it out")
        if problems:
            raise ValueError("evaluate: " + "; ".join(problems))


def _below_one(args: object, *names: str) -> list[str]:
    values = {name: getattr(args, name) for name in names}
    return [
        f"{k} must be at least 1, got {v}" for k, v in values.items() if v is not None and v < 1
    ]
