"""Prompts: chat template and token ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from knockout.benchmarks.types import Chat, Problem
from knockout.config.sweep import ChatSettings
from knockout.errors import UsageError

__all__ = ["chat_for", "chat_renderer", "encode_prompt"]


def chat_for(settings: ChatSettings, tokenizer: Any, whose: str) -> Chat:
    """What a file asks for, with the tokenizer's own answer if it leaves `template` open.

    Args:
        settings: The part `chat` of a sweep or mine file.
        tokenizer: Of the model that answers.
        whose: The model, for messages.

    Raises:
        UsageError: It asks for a chat template that the tokenizer lacks.
    """
    there = bool(getattr(tokenizer, "chat_template", None))
    if settings.template and not there:
        raise UsageError(
            f"chat.template is true, but the tokenizer of {whose} has no chat template; "
            "set it to false"
        )
    template = there if settings.template is None else settings.template
    return Chat(template, settings.system, dict(settings.args), settings.think_end)


def chat_renderer(tokenizer: Any, chat: Chat) -> Callable[..., str]:
    """Returns the function that lm-eval calls with a list of messages."""
    from jinja2.exceptions import TemplateError

    def render(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        def apply(these: list[dict[str, str]]) -> str:
            return str(
                tokenizer.apply_chat_template(
                    these,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                    **chat.args,
                )
            )

        try:
            return apply(messages)
        except TemplateError as error:
            if chat.system is not None or all(m["role"] != "system" for m in messages):
                raise UsageError(
                    f"the chat template refuses this conversation: {error}. "
                    "Set chat.system to null, or chat.template to false"
                ) from error
            # As lm-eval does: a task's description goes where the template has no place for it.
            return apply([m for m in messages if m["role"] != "system"])

    return render


def encode_prompt(tokenizer: Any, problem: Problem, chat: Chat) -> tuple[int, ...]:
    """Turns a prompt into token ids, with exactly one beginning-of-text token if one is used.

    A chat template writes its own; a plain prompt gets the tokenizer's.
    """
    bos = getattr(tokenizer, "bos_token", None)
    special = not chat.template and not (bos and problem.prompt.startswith(bos))
    return tuple(tokenizer.encode(problem.prompt, add_special_tokens=special))
