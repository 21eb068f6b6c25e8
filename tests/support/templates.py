"""Chat templates that treat a system message in the middle of a chat in different ways."""

_TURNS = """{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' + (m['content'] or '') \
+ '<|im_end|>\\n' }}{%- endfor %}"""
_ASKED = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"

# SmolLM2's own: a default system prompt, and every message where it stands.
_SMOLLM2 = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\
<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] \
+ '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}\
{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Only the first message can be the system's; the others keep their place and role.
_LLAMA3 = """\
{%- set first = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}
{%- set rest = messages[1:] if messages[0]['role'] == 'system' else messages %}
{{- '<h>system<e>\\n' + first + '<t>' }}
{%- for m in rest %}{{- '<h>' + m['role'] + '<e>\\n' + (m['content'] or '') + '<t>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<h>assistant<e>\\n' }}{%- endif %}"""

# All system messages are joined at the start.
_DEEPSEEK = """\
{%- set ns = namespace(system='') %}
{%- for m in messages %}{%- if m['role'] == 'system' %}
{%- set ns.system = ns.system + m['content'] + '\\n\\n' %}{%- endif %}{%- endfor %}
{{- '<begin>' + ns.system }}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{{- '<User>' + m['content'] }}{%- endif %}
{%- if m['role'] == 'assistant' %}{{- '<Assistant>' + (m['content'] or '') + '<end>' }}{%- endif %}
{%- if m['role'] == 'tool' %}{{- '<Result>' + m['content'] }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<Assistant>' }}{%- endif %}"""
_JOINED = """\
{{- messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join('\\n') }}
{%- for m in messages if m['role'] != 'system' %}
{{- '### ' + m['role'] + '\\n' + (m['content'] or '') + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '### assistant\\n' }}{%- endif %}"""

# The first message may be the system's, and then the roles must alternate.
_ALTERNATES = """\
{%- set first = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' %}
{%- set rest = messages[1:] if messages[0]['role'] == 'system' else messages %}
{%- for m in rest %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/...') }}{%- endif %}
"""
_GEMMA = (
    _ALTERNATES
    + """\
{{- '<start>' + m['role'] + '\\n' + (first if loop.first else '') + m['content'] + '<stop>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<start>model\\n' }}{%- endif %}"""
)
_MISTRAL = (
    _ALTERNATES
    + """\
{%- if m['role'] == 'user' %}
{{- '[INST] ' + (first if loop.first else '') + m['content'] + ' [/INST]' }}
{%- elif m['role'] == 'assistant' %}{{- ' ' + m['content'] + '</s>' }}
{%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}{%- endif %}
{%- endfor %}"""
)

# A system message must be the first one.
_STRICT = (
    """\
{%- for m in messages %}{%- if m['role'] == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{%- endif %}{%- endfor %}
"""
    + _TURNS
    + _ASKED
)

# Messages of roles that it does not name are left out.
_SILENT = """\
{%- for m in messages %}
{%- if m['role'] == 'system' and loop.first %}{{- m['content'] + '\\n' }}
{%- elif m['role'] == 'user' %}{{- 'USER: ' + m['content'] + '\\n' }}
{%- elif m['role'] == 'assistant' %}{{- 'ASSISTANT: ' + m['content'] + '\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'ASSISTANT: ' }}{%- endif %}"""

TEMPLATES = {
    "smollm2": _SMOLLM2,
    "chatml": _TURNS + _ASKED,
    "llama3": _LLAMA3,
    "deepseek": _DEEPSEEK,
    "joined": _JOINED,
    "gemma": _GEMMA,
    "mistral": _MISTRAL,
    "strict": _STRICT,
    "silent": _SILENT,
}
