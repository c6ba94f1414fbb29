"""Chat templates: Apple's instruct format, rendering with Jinja, and safety against control tokens.

Knows nothing of token ids: messages and a template go in, text comes out.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, object]
T = TypeVar("T")

# The format of corenet@1aa3acd (openelm/instruction_tuning/openelm-instruct.yaml), trained by
# alignment-handbook@70769f9, which puts an empty system message before a first user message.
# "<|user|>" and its like are ordinary pieces; only the end-of-text token is special.
APPLE_INSTRUCT_TEMPLATE = r"""{{ bos_token }}
{%- if messages and messages[0]['role'] == 'user' %}
{{- '<|system|>\n' + eos_token + '\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] not in ['system', 'user', 'assistant'] %}
{{- raise_exception('roles are system, user and assistant, got ' + message['role']) }}
{%- endif %}
{{- '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\n' }}
{%- endif %}"""

# Small models loop without a penalty; 1.2 is what Apple's model card uses.
CHAT_DEFAULTS = {"temp": 0.7, "top_p": 0.9, "repetition_penalty": 1.2}
NEXT_TURN = ("<|user|>", "<|system|>")  # not special tokens: the model can write them itself

_PRIVATE_USE = range(0xE000, 0xF900)


def is_instruct(name: str | None) -> bool:
    """Whether a repository or folder name says that the model was tuned to follow instructions."""
    return name is not None and "instruct" in name.lower()


def render(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    special_tokens: Mapping[str, str],
) -> str:
    """Render messages as transformers does.

    Args:
        template: Jinja source.
        messages: dictionaries with ``role`` and ``content``.
        add_generation_prompt: whether the answer's header is written at the end.
        special_tokens: ``bos_token``, ``eos_token`` and the like, for the template.

    Raises:
        ValueError: if a message has no role or content, or the template is wrong or refuses them.
    """
    from jinja2 import TemplateError

    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ValueError(
                f"message {index} needs the keys 'role' and 'content', got {_shown(message)}"
            )
    try:
        return _compile(template).render(
            messages=list(messages), add_generation_prompt=add_generation_prompt, **special_tokens
        )
    except (TemplateError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the chat template cannot render these messages: {reason}") from error


def protect(messages: Sequence[Message], controls: Iterable[str]) -> tuple[list[Message], str]:
    """Break control strings inside messages, so that only those of the template are whole.

    A guard character that no message holds goes into each control string, and between a message
    and the template where the two might form one; take it out again after splitting at control
    strings. Strings of one character cannot be broken and stay.

    Returns:
        The messages to render, and the guard.
    """
    known = [control for control in controls if len(control) > 1]
    written = json.dumps(messages, ensure_ascii=False, default=str)
    guard = next(chr(code) for code in _PRIVATE_USE if chr(code) not in written)
    return [_guarded(message, known, guard) for message in messages], guard


def _guarded(value: T, controls: Sequence[str], guard: str) -> T:
    if isinstance(value, str):
        return _guarded_text(value, controls, guard)  # type: ignore[return-value]  # T is str here
    if isinstance(value, Mapping):
        return {key: _guarded(item, controls, guard) for key, item in value.items()}  # type: ignore[return-value]
    if isinstance(value, list | tuple):
        return [_guarded(item, controls, guard) for item in value]  # type: ignore[return-value]
    return value


def _guarded_text(text: str, controls: Sequence[str], guard: str) -> str:
    for control in controls:
        text = text.replace(control, control[0] + guard + control[1:])
    if any(text.endswith(c[:n]) for c in controls for n in range(1, len(c))):
        text += guard
    if any(text.startswith(c[n:]) for c in controls for n in range(1, len(c))):
        text = guard + text
    return text


@lru_cache(maxsize=8)
def _compile(template: str) -> "Template":
    """The Jinja environment of transformers' chat templates: sandboxed, blocks trimmed."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``, which marks answers for training elsewhere: here just its body."""

        tags = {"generation"}  # noqa: RUF012 - the name and type that Jinja asks for

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json  # Jinja's own escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
