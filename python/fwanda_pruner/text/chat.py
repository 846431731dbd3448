"""Conversations, and the text that a tokenizer's chat template makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..errors import UserError, one_line, show

FIELDS = ("messages", "conversations")  # of a row that holds a conversation
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_SHAREGPT = {"human": "user", "gpt": "assistant"}  # roles of {"from": ..., "value": ...}


class Conversation(NamedTuple):
    """Messages in the form of apply_chat_template().

    Attributes:
        messages: dicts with "role" and "content", and what else the row held.
        where: names the row in errors.
    """

    messages: list[dict]
    where: str


class Rendered(Sequence):
    """Documents of which some are conversations. The chat template turns one into text when it is asked for.

    Args:
        documents: texts and conversations.
        tokenizer: has the chat template; may be None.

    Raises:
        UserError: from [], if there is no chat template, or if it refuses a conversation.
    """

    def __init__(self, documents: Sequence[str | Conversation], tokenizer: Any):
        self._documents, self._tokenizer = documents, tokenizer

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> str:
        return self._text(self._documents[index])

    def __iter__(self) -> Iterator[str]:
        return map(self._text, self._documents)

    def _text(self, document: str | Conversation) -> str:
        return document if isinstance(document, str) else _render(document, self._tokenizer)


def conversation_of(messages: Any, where: str) -> Conversation:
    """Checks a list of messages, each with "role" and "content", or with "from" and "value".

    Args:
        messages: any value of a row.
        where: names the row in errors.

    Raises:
        UserError: it is no such list, or a role is unknown.
    """
    if not isinstance(messages, list):
        raise UserError(f"{where}: the messages must be a list of objects, got {show(messages)}")
    return Conversation([_message(m, f"{where}, message {i}") for i, m in enumerate(messages, start=1)], where)


def _message(message: Any, where: str) -> dict:
    if not isinstance(message, dict):
        raise UserError(f'{where}: expected an object with "role" and "content", got {show(message)}')
    role_key, content_key = ("from", "value") if "role" not in message and "from" in message else ("role", "content")
    if role_key not in message or (content_key not in message and "tool_calls" not in message):
        raise UserError(f'{where}: expected the fields "role" and "content", got {show(list(message))}')
    role, content = message[role_key], message.get(content_key)
    role = _SHAREGPT.get(role, role) if isinstance(role, str) else role
    if role not in _ROLES:
        raise UserError(f"{where}: the role must be one of {', '.join(_ROLES)}, human or gpt, got {show(role)}")
    rest = {key: value for key, value in message.items() if key not in (role_key, content_key)}
    return {**rest, "role": role, "content": _content(content, where)}


def _content(content: Any, where: str) -> str:
    """The text of a message: a string, nothing, or a list of parts {"type": "text", "text": ...}."""
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        content = "".join(part["text"] if isinstance(part["text"], str) else "" for part in content)
    if content is None:
        return ""
    if not isinstance(content, str):
        raise UserError(f"{where}: the content must be text, got {show(content)}")
    return content


def _render(conversation: Conversation, tokenizer: Any) -> str:
    where = conversation.where
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError(
            f"{where}: a conversation needs a tokenizer with a chat template, and this one has none; give plain text "
            f'in a field "text", or take the tokenizer of a chat model'
        )
    try:
        text = tokenizer.apply_chat_template(conversation.messages, tokenize=False)
        text.encode()
    except Exception as error:  # a template can raise anything
        raise UserError(f"{where}: the chat template refuses the conversation: {one_line(error)}") from error
    return text
