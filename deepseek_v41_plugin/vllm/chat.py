# SPDX-License-Identifier: Apache-2.0
"""Chat requests: add_generation_prompt and continue_final_message honoured, images refused by name.

The host's V4.1 tokenizer accepts both flags and ignores them; for a text-only model its answer to an
image does not mention images.  These classes stand in the host's two registries in place of its own.
"""

from __future__ import annotations

from typing import Any

from transformers import TokenizersBackend
from vllm.renderers import deepseek_v4 as renderers
from vllm.tokenizers.deepseek_v41 import get_deepseek_v41_tokenizer
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.tokenizers.protocol import TokenizerLike

# What the host's encoder ends a conversation with when the assistant is to speak, thinking or not.
_HEADERS = ("<｜Assistant｜><think>", "<｜Assistant｜></think>")
# 0.33 has a renderer of its own for V4.1, 0.32 uses V4's.
_HostRenderer = getattr(renderers, "DeepseekV41Renderer", renderers.DeepseekV4Renderer)


def with_chat_flags(tokenizer):
    """The host's V4.1 tokenizer around `tokenizer`, with both flags honoured."""
    wrapped = get_deepseek_v41_tokenizer(tokenizer)

    class ChatTokenizer(wrapped.__class__):
        def apply_chat_template(
            self, messages, tools=None, add_generation_prompt: bool = True,
            continue_final_message: bool = False, tokenize: bool = True, **kwargs: Any,
        ) -> str | list[int]:
            if continue_final_message:
                if not messages or messages[-1].get("role") != "assistant":
                    raise ValueError(
                        "continue_final_message: the last message is not the assistant's. "
                        "Add the message to be continued, or leave the flag out"
                    )
                messages = [*messages[:-1], {**messages[-1], "wo_eos": True}]
            text = super().apply_chat_template(messages, tools, tokenize=False, **kwargs)
            if not add_generation_prompt:
                for header in _HEADERS:
                    text = text.removesuffix(header)
            if not tokenize:
                return text
            limits = {key: kwargs[key] for key in ("truncation", "max_length") if key in kwargs}
            return self.encode(text, add_special_tokens=False, **limits)

        def __reduce__(self):
            return with_chat_flags, (tokenizer,)

    wrapped.__class__ = ChatTokenizer
    return wrapped


class DeepseekV41Tokenizer(TokenizerLike):
    """Stands in the host's TokenizerRegistry under "deepseek_v41"."""

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        return get_cached_tokenizer(with_chat_flags(TokenizersBackend.from_pretrained(*args, **kwargs)))


class DeepseekV41Renderer(_HostRenderer):
    """Stands in the host's RENDERER_REGISTRY under "deepseek_v41"."""

    def render_messages(self, messages, params):
        refuse_images(messages)
        return super().render_messages(messages, params)

    async def render_messages_async(self, messages, params):
        refuse_images(messages)
        return await super().render_messages_async(messages, params)


def refuse_images(messages) -> None:
    """Raise ValueError, which the server answers with 400, if a part is an image."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            if "image" in kind:
                raise ValueError(
                    f"messages: {kind} parts are not supported: this server reads text only "
                    "(the plugin leaves DeepSeek-V4.1's vision tower out). Remove the images"
                )
