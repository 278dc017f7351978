"""Short chat templates of the model families, written for these tests. They open and end turns, call tools and render
results like the published ones, and do nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tiny_models

QWEN = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "{% if not loop.first or m.content %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like Qwen 3's: the last turn has an empty reasoning block if the policy did not reason.
QWEN3 = QWEN.replace(
    "{{ m.content or '' }}",
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content or '' }}",
)
# Has no end of an assistant's turn: the token that opens the next turn ends it.
GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '<|assistant|>\n<think></think>' }}"
    "{% if m.content and m.content.strip() %}{{ '\n' + m.content.strip() }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name + '\n' }}"
    "{% for key, value in call.function.arguments.items() %}"
    "{{ '<arg_key>' + key + '</arg_key>\n<arg_value>' }}{{ value if value is string else value | tojson }}"
    "{{ '</arg_value>\n' }}{% endfor %}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|observation|>{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% else %}{{ '<|' + m.role + '|>\n' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# No head before an answer.
MISTRAL = (
    "<s>{% for tool in tools or [] %}{{ loop.first and '[AVAILABLE_TOOLS] ' or '' }}{{ tool | tojson }}"
    "{{ loop.last and '[/AVAILABLE_TOOLS]' or '' }}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}"
    "{% elif m.role == 'assistant' %}{{ m.content or '' }}{% if m.tool_calls %}[TOOL_CALLS] ["
    "{% for call in m.tool_calls %}"
    "{{ '{\"name\": \"' + call.function.name + '\", \"arguments\": ' }}{{ call.function.arguments | tojson + '}' }}"
    "{{ '' if loop.last else ', ' }}{% endfor %}]{% endif %}</s>"
    "{% else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}{% endfor %}"
)
# Arguments are text, an answer is followed by no head of a turn, and a call in a message with content by an empty turn.
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% set state = namespace(first=true, tool=false) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set state.tool = false %}{{ '<｜User｜>' + m.content }}{% elif m.role == 'tool' %}{% set state.tool = true %}"
    "{{ '<｜tool▁outputs▁begin｜>' if state.first else '\n' }}{% set state.first = false %}"
    "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% else %}"
    "{{ '<｜tool▁outputs▁end｜>' if state.tool else '<｜Assistant｜>' }}{% set state.tool = false %}"
    "{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for call in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}"
    "{{ call.function.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}"
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>{% endif %}"
    "{% if m.content is not none %}{{ m.content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endif %}{% endfor %}"
    "{% if state.tool %}<｜tool▁outputs▁end｜>{% elif add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
# Like GLM 4.7's: without line breaks in calls.
GLM47 = (
    GLM.replace("'\n<tool_call>' + call.function.name + '\n'", "'<tool_call>' + call.function.name")
    .replace("'</arg_key>\n<arg_value>'", "'</arg_key><arg_value>'")
    .replace("'</arg_value>\n'", "'</arg_value>'")
)
# Arguments are typed, and an answer after results is a part of the turn.
DEEPSEEK32 = (
    "<｜begin▁of▁sentence｜>{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}{{ '\n\n<function_results>' }}{% endif %}"
    "{{ '\n<result>' + m.content + '</result>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '\n</function_results>\n\n' }}{% endif %}"
    "{% elif m.role == 'assistant' %}{% if loop.first or loop.previtem.role != 'tool' %}<｜Assistant｜>{% endif %}"
    "{{ m.content or '' }}{% if m.tool_calls %}{{ '\n\n<｜DSML｜function_calls>\n' }}{% for call in m.tool_calls %}"
    "{{ '<｜DSML｜invoke name=\"' + call.function.name + '\">\n' }}"
    "{% for key, value in call.function.arguments.items() %}"
    "{{ '<｜DSML｜parameter name=\"' + key + '\" string=\"' + ('true' if value is string else 'false') + '\">' }}"
    "{{ value if value is string else value | tojson }}{{ '</｜DSML｜parameter>\n' }}{% endfor %}"
    "{{ '</｜DSML｜invoke>\n' }}{% endfor %}</｜DSML｜function_calls>{% endif %}<｜end▁of▁sentence｜>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<｜Assistant｜>{% endif %}"
)
# Prints a call's id and a tool's name.
KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_system|>' + m.name + '<|im_middle|>## Return of ' + m.tool_call_id + '\n' + m.content }}"
    "{% else %}{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + (m.content or '') }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for call in m.tool_calls %}"
    "{{ '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + call.function.arguments | tojson }}"
    "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
# One call a turn, and results as JSON.
LLAMA = (
    "<|begin_of_text|>{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{ m.content | tojson }}<|eot_id|>"
    "{% else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{ m.tool_calls[0].function.arguments | tojson + '}' }}{% else %}"
    "{% if loop.index == 1 and tools %}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{% endif %}"
    "{{ m.content }}{% endif %}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Knows two roles, in turns.
GEMMA = (
    "<bos>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

# Arguments between tags.
MINIMAX = (
    "]~!b[{% if tools %}]~b]system\n{% for tool in tools %}<tool>{{ tool.function | tojson }}</tool>\n{% endfor %}"
    "[e~[\n{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}]~b]tool{% endif %}{{ '\n<response>' + m.content + '</response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}[e~[\n{% endif %}{% else %}"
    "{{ ']~b]' + ('ai' if m.role == 'assistant' else m.role) + '\n' + (m.content or '') }}"
    "{% if m.tool_calls %}{{ '\n<minimax:tool_call>\n' }}{% for call in m.tool_calls %}"
    "{{ '<invoke name=\"' + call.function.name + '\">\n' }}{% for key, value in call.function.arguments.items() %}"
    "{{ '<parameter name=\"' + key + '\">' }}{{ value if value is string else value | tojson }}"
    "{{ '</parameter>\n' }}{% endfor %}{{ '</invoke>\n' }}{% endfor %}</minimax:tool_call>{% endif %}"
    "[e~[\n{% endif %}{% endfor %}{% if add_generation_prompt %}]~b]ai\n{% endif %}"
)


@dataclass(frozen=True)
class ChatFormat:
    template: str
    control: tuple[str, ...]
    """Control tokens besides those of `tiny_models.tokenizer`; the first is the tokenizer's eos_token."""
    after_call: str
    """The token that ends a turn with a call."""
    after_answer: str
    """The token that ends the last turn."""
    end_tokens: tuple[str, ...]
    call: str
    """A call of the calculator with 1+2, as these models write it."""
    observation: str
    """The tokens after that turn, with the result 3."""
    parser: str = ""
    eos: tuple[str, ...] = ()
    """The eos tokens of generation_config.json."""

    def tokenizer(self) -> Any:
        tokenizer = tiny_models.tokenizer()
        tokenizer.add_special_tokens({"eos_token": self.control[0], "additional_special_tokens": list(self.control)})
        tokenizer.chat_template = self.template
        return tokenizer


_JSON = '{"expression": "1+2"}'
_QWEN = {
    "control": ("<|im_end|>",),
    "after_call": "<|im_end|>",
    "after_answer": "<|im_end|>",
    "end_tokens": ("<|im_end|>", "<|endoftext|>"),
    "call": f'<tool_call>\n{{"name": "calculator", "arguments": {_JSON}}}\n</tool_call>',
    "observation": "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "parser": "qwen25",
    "eos": ("<|im_end|>", "<|endoftext|>"),
}
PUBLISHED = {
    "qwen": ChatFormat(QWEN, **_QWEN),  # type: ignore[arg-type]
    "qwen3": ChatFormat(QWEN3, **_QWEN),  # type: ignore[arg-type]
    "glm": ChatFormat(
        GLM,
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        after_call="<|observation|>",
        after_answer="<|endoftext|>",
        end_tokens=("<|endoftext|>", "<|user|>", "<|observation|>"),
        call="\n<think></think>\n<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>1+2</arg_value>\n"
        "</tool_call>",
        observation="\n<tool_response>\n3\n</tool_response><|assistant|>",
        parser="glm45",
        eos=("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    "glm47": ChatFormat(
        GLM47,
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        after_call="<|observation|>",
        after_answer="<|endoftext|>",
        end_tokens=("<|endoftext|>", "<|user|>", "<|observation|>"),
        call="\n<think></think><tool_call>calculator<arg_key>expression</arg_key><arg_value>1+2</arg_value></tool_call>",
        observation="\n<tool_response>\n3\n</tool_response><|assistant|>",
        parser="glm47",
        eos=("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    "deepseek32": ChatFormat(
        DEEPSEEK32,
        ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "｜DSML｜"),
        after_call="<｜end▁of▁sentence｜>",
        after_answer="<｜end▁of▁sentence｜>",
        end_tokens=("<｜end▁of▁sentence｜>",),
        call='\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="calculator">\n<｜DSML｜parameter name="expression" '
        'string="true">1+2</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        observation="\n\n<function_results>\n<result>3</result>\n</function_results>\n\n",
        parser="deepseekv32",
    ),
    "deepseek": ChatFormat(
        DEEPSEEK,
        (
            *("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"),
            *(f"<｜tool▁{name}▁begin｜>" for name in ("call", "calls", "output", "outputs")),
            *(f"<｜tool▁{name}▁end｜>" for name in ("call", "calls", "output", "outputs")),
        ),
        after_call="<｜end▁of▁sentence｜>",
        after_answer="<｜end▁of▁sentence｜>",
        end_tokens=("<｜end▁of▁sentence｜>",),
        call=f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n{_JSON}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        observation="<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>3<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        parser="deepseekv3",
    ),
    "kimi": ChatFormat(
        KIMI,
        (
            *("<|im_end|>", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
            *(f"<|tool_call{name}|>" for name in ("s_section_begin", "s_section_end", "_begin", "_end")),
            "<|tool_call_argument_begin|>",
        ),
        after_call="<|im_end|>",
        after_answer="<|im_end|>",
        end_tokens=("<|im_end|>",),
        call="<|tool_calls_section_begin|><|tool_call_begin|>functions.calculator:0<|tool_call_argument_begin|>"
        f"{_JSON}<|tool_call_end|><|tool_calls_section_end|>",
        observation="<|im_system|>calculator<|im_middle|>## Return of functions.calculator:0\n3<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>",
        parser="kimi_k2",
    ),
    "llama": ChatFormat(
        LLAMA,
        (
            *("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eom_id|>", "<|end_of_text|>"),
        ),
        after_call="<|eot_id|>",
        after_answer="<|eot_id|>",
        end_tokens=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        call=f'{{"name": "calculator", "parameters": {_JSON}}}',
        observation='<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        parser="llama3",
        eos=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    "minimax": ChatFormat(
        MINIMAX,
        ("[e~[", "]~!b[", "]~b]"),
        after_call="[e~[",
        after_answer="[e~[",
        end_tokens=("[e~[",),
        call='\n<minimax:tool_call>\n<invoke name="calculator">\n<parameter name="expression">1+2</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        observation="\n]~b]tool\n<response>3</response>[e~[\n]~b]ai\n",
        parser="minimax-m2",
    ),
    "mistral": ChatFormat(
        MISTRAL,
        ("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        after_call="</s>",
        after_answer="</s>",
        end_tokens=("</s>",),
        call=f'[TOOL_CALLS] [{{"name": "calculator", "arguments": {_JSON}}}]',
        observation="[TOOL_RESULTS] 3[/TOOL_RESULTS]",
        parser="mistral",
    ),
}
