"""Short chat templates, written for these tests, of families that reason and of other call formats, like the published
ones."""

from __future__ import annotations

from templates import GLM, PUBLISHED, QWEN, ChatFormat

# Keeps reasoning only after the last user message; accepts it in a separate field.
QWEN3_THINKING = (
    "{% set last = namespace(user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
) + QWEN.replace(
    "<|im_start|>{{ m.role }}\n{{ m.content or '' }}",
    "{% set said = namespace(text=m.content or '', thought='') %}"
    "{% if m.role == 'assistant' and m.reasoning_content is string %}{% set said.thought = m.reasoning_content %}"
    "{% elif m.role == 'assistant' and '</think>' in said.text %}"
    "{% set said.thought = said.text.split('</think>')[0].split('<think>')[-1] | trim %}"
    "{% set said.text = said.text.split('</think>')[-1].lstrip() %}{% endif %}"
    "<|im_start|>{{ m.role }}\n"
    "{% if said.thought and loop.index0 > last.user %}{{ '<think>\n' + said.thought + '\n</think>\n\n' }}{% endif %}"
    "{{ said.text }}",
)
# Opens reasoning itself, after user messages and after results.
QWEN3_OPENED = QWEN3_THINKING.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
)
# Calls as XML without types.
QWEN3_CODER = QWEN.replace(
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}\n</tool_call>' }}",
    "{{ '<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{% for key, value in call.function.arguments.items() %}"
    "{{ '<parameter=' + key + '>\n' }}{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}"
    "{% endfor %}{{ '</function>\n</tool_call>' }}",
)
GLM_THINKING = (
    "{% set last = namespace(user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
) + GLM.replace(
    "{{ '<|assistant|>\n<think></think>' }}"
    "{% if m.content and m.content.strip() %}{{ '\n' + m.content.strip() }}{% endif %}",
    "{% set said = namespace(text=m.content or '', thought='') %}"
    "{% if m.reasoning_content is string %}{% set said.thought = m.reasoning_content %}"
    "{% elif '</think>' in said.text %}{% set said.thought = said.text.split('</think>')[0].split('<think>')[-1] %}"
    "{% set said.text = said.text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|assistant|>\n<think>' + (said.thought if loop.index0 > last.user else '') + '</think>' }}"
    "{% if said.text.strip() %}{{ '\n' + said.text.strip() }}{% endif %}",
)
# Moves system messages to the top. Opens reasoning after a user message and drops it later; after a tool result a turn
# continues without a head and stays unchanged.
_DEEPSEEK_HEAD = (
    "<｜begin▁of▁sentence｜>{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% set state = namespace(tool=false) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set state.tool = false %}{{ '<｜User｜>' + m.content }}"
)
DEEPSEEK_R1 = (
    _DEEPSEEK_HEAD + "{% elif m.role == 'tool' %}{{ '\n' if state.tool else '<｜tool▁outputs▁begin｜>' }}"
    "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% set state.tool = true %}"
    "{% elif m.role == 'assistant' %}{{ '<｜tool▁outputs▁end｜>' if state.tool else '<｜Assistant｜>' }}"
    "{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for call in m.tool_calls %}{{ '' if loop.first else '\n' }}"
    "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}"
    "{{ call.function.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    "{% else %}{{ m.content if state.tool else m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% endif %}"
    "{% set state.tool = false %}{% endif %}{% endfor %}{% if state.tool %}<｜tool▁outputs▁end｜>"
    "{% elif add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
# Closes reasoning in the head of a turn, writes calls without Markdown, and does not close the list of results.
DEEPSEEK31 = (
    _DEEPSEEK_HEAD + "{% elif m.role == 'tool' %}{% set state.tool = true %}"
    "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
    "{% elif m.role == 'assistant' %}{% if not state.tool %}<｜Assistant｜></think>{% endif %}"
    "{{ (m.content or '').split('</think>')[-1] }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
    "{% for call in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}"
    "{{ call.function.arguments + '<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
    "<｜end▁of▁sentence｜>{% set state.tool = false %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not state.tool %}<｜Assistant｜></think>{% endif %}"
)
# Reasoning only in a separate field; kept after results until the policy's next text.
KIMI_THINKING = (
    PUBLISHED["kimi"]
    .template.replace(
        "{% for m in messages %}",
        "{% set last = namespace(said=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
        "{% set last.said = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}",
        1,
    )
    .replace(
        "'<|im_middle|>' + (m.content or '') }}",
        "'<|im_middle|>' }}{% if m.role == 'assistant' %}{{ '<think>' }}"
        "{% if loop.index0 > last.said %}{{ m.reasoning_content or '' }}{% endif %}{{ '</think>' }}{% endif %}"
        "{{ m.content or '' }}",
    )
)
# Several messages in a turn. Takes a result's call from a message before it, and rejects a result without a call.
HARMONY = (
    "{% set last = namespace(name=none) %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if last.name is none %}{{ raise_exception('a result without a call before it') }}{% endif %}"
    "{{ '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary' }}"
    "{{ '<|message|>' + m.content | tojson + '<|end|>' }}"
    "{% elif m.tool_calls %}{% set last.name = m.tool_calls[0].function.name %}{% if m.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|channel|>commentary json<|message|>' }}"
    "{{ m.tool_calls[0].function.arguments | tojson + '<|call|>' }}"
    "{% elif m.role == 'assistant' %}{% set last.name = none %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Calls as a Python list.
PYTHONIC = (
    "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{% if m.tool_calls %}{{ '[' }}{% for call in m.tool_calls %}{{ '' if loop.first else ', ' }}"
    "{{ call.function.name + '(' }}{% for key, value in call.function.arguments.items() %}"
    "{{ '' if loop.first else ', ' }}{{ key + '=' }}{{ value | pprint }}{% endfor %}{{ ')' }}{% endfor %}{{ ']' }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

THINK = ("<think>", "</think>")
_DEEPSEEK = PUBLISHED["deepseek"].control
_HARMONY = ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|constrain|>")
_GEMMA = ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")


def _make_format(template: str, control: tuple[str, ...], parser: str) -> ChatFormat:
    return ChatFormat(template, control, "", "", (), "", "", parser)


REASONING = {
    "qwen3": _make_format(QWEN3_THINKING, PUBLISHED["qwen"].control, "qwen25"),
    "qwen3 opened": _make_format(QWEN3_OPENED, PUBLISHED["qwen"].control, "qwen25"),
    "glm": _make_format(GLM_THINKING, PUBLISHED["glm"].control, "glm45"),
    "deepseek r1": _make_format(DEEPSEEK_R1, _DEEPSEEK, "deepseekv3"),
    "deepseek v3.1": _make_format(DEEPSEEK31, _DEEPSEEK, "deepseekv31"),
    "kimi": _make_format(KIMI_THINKING, PUBLISHED["kimi"].control, "kimi_k2"),
}
"""Formats whose tokenizers also need the tokens in `THINK`."""
OTHER_FORMATS = {
    "qwen3 coder": _make_format(QWEN3_CODER, PUBLISHED["qwen"].control, "qwen3_coder"),
    "pythonic": _make_format(PYTHONIC, _GEMMA, "pythonic"),
    "harmony": _make_format(HARMONY, _HARMONY, "gpt-oss"),
}
WITHOUT_RESULTS = _make_format(
    QWEN.replace(
        "{% if m.role == 'tool' %}",
        "{% if m.role == 'tool' %}{% if not loop.previtem.tool_calls %}"
        "{{ raise_exception('a result without a call before it') }}{% endif %}",
        1,
    ),
    PUBLISHED["qwen"].control,
    "qwen25",
)


def reasoning_tokenizer(family: ChatFormat) -> object:
    tokenizer = family.tokenizer()
    tokenizer.add_tokens(list(THINK))
    return tokenizer
