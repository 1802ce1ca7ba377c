"""Chat templates of three families, for the demo checkpoint's tokenizer."""

from typing import Any

from transformers import AutoTokenizer

from support.models import LOOKUP

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# With a system turn of its own, and messages stripped.
LLAMA_3 = (
    "{{ bos_token }}{% if messages[0]['role'] != 'system' %}<|start_header_id|>system"
    "<|end_header_id|>\n\nBe kind.<|eot_id|>{% endif %}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant"
    "<|end_header_id|>\n\n{% endif %}"
)
# No system turns, and no token that ends the user's.
PLAIN = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('no system turns') }}{% elif message['role'] == 'user' %}"
    "[ {{ message['content'] }} ] {% else %}{{ message['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "llama_3": LLAMA_3, "plain": PLAIN}
ENDS = {"chatml": "<|im_end|>", "llama_3": "<|eot_id|>", "plain": "<|end|>"}


def chat_tokenizer(template: str | None) -> Any:
    """The demo checkpoint's tokenizer with this template, and the special tokens of all three."""
    tokenizer: Any = AutoTokenizer.from_pretrained(LOOKUP)
    markers = ("im_start", "im_end", "start_header_id", "end_header_id", "eot_id")
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [f"<|{marker}|>" for marker in markers]}
    )
    tokenizer.chat_template = template
    return tokenizer
