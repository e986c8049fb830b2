"""Writes tokens.json and templates.json: ids of the `tokenizers` library, text of Jinja2.

    tokens.py FIXTURE/tokenizer.json [MODELS TEXTS]

MODELS is a folder with the GGUF files named below, TEXTS one with eval_en.txt, eval_zh.txt and
eval_code.txt. Without the two, what the present files say about the models is kept. Needs
`pip install tokenizers jinja2`, and `gguf` for the models.
"""

import json
import random
import sys
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer, models, normalizers, trainers

HERE = Path(__file__).parent
MODELS = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": "smollm",
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": "qwen2",
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf": "qwen2",
}
# The published pre-tokenisers: Hugging Face's tokenizer.json of Qwen2.5 and SmolLM2.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# --- texts -------------------------------------------------------------------------------------

TEXTS = [
    "", "a", " ", "  ", "\n", "\t", "Hello, world!",
    "naïve café, Åström, façade — “quoted”", "cafe\u0301 na\u0308ive e\u0301 A\u030a",
    "1984 3.14159 007 ½ ² ٣٤٥ １２３ Ⅻ 1,234,567",
    "😀 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇨🇭 ☺️ ✨✨✨",
    "你好，世界！今天天气很好。𠮷野家 龍", "日本語テキスト、カタカナ한국어 텍스트",
    "def f(x: int) -> int:\n    return x*2  # comment\n\tif x:\n\t\tpass\n",
    "for (int i=0;i<n;++i){a[i]^=0xFF;}\r\n// end\r\n",
    "   leading and trailing   ", " \n \n\n  x", "a\n\n\n\nb", "tabs\t\there\t x", "\r\n\r\n\r",
    "I'm we'RE they'LL you'd It'S don'T 've ' s", "'ſ 'K x'ſy",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "a<|im_end|>b <|im_end|> c",
    "<|endoftext|><|im_start|><|im_start", "https://example.com/a?b=c&d=%20#e",
    "\u00a0nbsp\u00a0\u00a0x\u3000\u3000y\u2003z", "\u200b\u200d\ufeff\u00ad",
    "مرحبا بالعالم שלום नमस्ते สวัสดี ქართული", "Ελληνικά Русский текст ДОМ",
    "CamelCaseHTTPRequest snake_case kebab-case", "!!!???...---===***", "a" * 120, "ab" * 80,
    " " * 100 + "x", "\n" * 70, "x" + " " * 64 + "\n", "_ __ ▁ ▁▁x", "\x00\x01\x7f\x1b[0m",
    "🤖" * 20, "é" * 60, "<0x0A><unk>", " a  b   c    d     e", "$100 €50 ¥3 +-=<>^~|`\\/",
    "\u0085\u2028x\u2029y\u000b\u000cz", "ﬁ ﬂ ß İ ı ǅ Ⓐⓑ ㊀ ㎏ ™ ©",
]


def mixed_texts(count):
    """Random mixtures of scripts, spaces and punctuation."""
    draw = random.Random(7)
    blocks = [(0x21, 0x7F), (0x21, 0x7F), (0xA0, 0x180), (0x300, 0x330), (0x391, 0x3A2),
              (0x410, 0x450), (0x905, 0x93A), (0x2010, 0x2028), (0x3041, 0x3060), (0x4E00, 0x4F00),
              (0xAC00, 0xAC40), (0x1F600, 0x1F640)]
    pool = [ord(c) for c in "   \n\r\t'"] + [c for low, high in blocks for c in range(low, high)]
    return ["".join(chr(draw.choice(pool)) for _ in range(draw.randint(1, 40))) for _ in range(count)]


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def fnv1a(numbers):
    """64-bit FNV-1a over the ids as little-endian u32."""
    digest = 0xCBF29CE484222325
    for number in numbers:
        for byte in number.to_bytes(4, "little"):
            digest = (digest ^ byte) * 0x100000001B3 % 2**64
    return f"{digest:016x}"


# --- tokenizers --------------------------------------------------------------------------------


def fixture(path):
    """Ids with marks recognised, and (the added tokens taken away) with marks as text."""
    source = json.loads(Path(path).read_text())
    marks = Tokenizer.from_str(json.dumps(source))
    plain = Tokenizer.from_str(json.dumps(source | {"added_tokens": []}))
    return [[text, ids(marks, text), ids(plain, text)] for text in TEXTS + mixed_texts(100)]


def sentencepiece():
    """A small tokenizer in the form of Llama 2's tokenizer.json, trained here, and ids."""
    text = "the cat sat on the mat and the other cat ate that hat 你好 世界 你好世界 über übel "
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False,
                                  max_token_length=8)
    tokenizer.train_from_iterator([text * 20], trainer)
    source = json.loads(tokenizer.to_str())
    # Bytes are tokens of the vocabulary, not names to be found in text.
    source["added_tokens"] = source["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(source))
    texts = TEXTS + ["the cat<s> sat</s>", "the that hat", text, "über", "</s>你好"]
    return {"tokenizer": source, "texts": [[text, ids(tokenizer, text)] for text in texts]}


def from_gguf(path, pre):
    """The reference tokenizer of a GGUF's vocabulary, with its name's published pre-tokeniser."""
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    tokens, kinds, merges = (
        fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type", "merges"))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    if pre == "smollm":
        steps = [{"type": "Digits", "individual_digits": True}, byte_level | {"use_regex": True}]
    else:
        split = {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False}
        steps = [split, byte_level | {"use_regex": False}]
    added = [
        {"id": i, "content": text, "special": kind == 3, "normalized": False,
         "single_word": False, "lstrip": False, "rstrip": False}
        for i, (text, kind) in enumerate(zip(tokens, kinds)) if kind in (3, 4)]
    vocab = {text: i for i, (text, kind) in enumerate(zip(tokens, kinds)) if kind != 5}
    source = {
        "version": "1.0", "added_tokens": added, "post_processor": None, "decoder": None,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges}}
    template = fields["tokenizer.chat_template"].contents()
    return Tokenizer.from_str(json.dumps(source)), template


# --- templates ---------------------------------------------------------------------------------

CONVERSATIONS = {
    "user": [["user", "Hi there"]],
    "system": [["system", "Be brief."], ["user", "  What is 2+2?\n"], ["assistant", " 4 "],
               ["user", "你好 <b>&amp;</b> \"quoted\" 'single'\n\n"]],
    "refused": [["assistant", "I speak first"]],
}

# Written for these tests, in the manner of published templates.
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}\n"
        "    {% if loop.first and message.role != 'system' %}\n"
        "{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}"
        "    {% endif %}\n"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"),
    "llama3": (
        "{{- bos_token }}\n"
        "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}\n"
        "{%- if messages[0]['role'] == 'system' %}\n"
        "    {%- set system = messages[0]['content'] | trim %}\n"
        "    {%- set messages = messages[1:] %}\n"
        "{%- else %}\n    {%- set system = '' %}\n{%- endif %}\n"
        "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system + '<|eot_id|>' }}\n"
        "{%- for message in messages %}\n"
        "    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}\n"
        "        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
        " + message['content'] | trim + '<|eot_id|>' }}\n"
        "    {%- endif %}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n"
        "    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n"
        "{%- endif %}\n"),
    "mistral": (
        "{{ bos_token }}{% set ns = namespace(index=0, system='') %}"
        "{% for message in messages %}"
        "{% if message['role'] == 'system' %}{% set ns.system = message['content'].strip() + '\\n\\n' %}"
        "{% continue %}{% endif %}"
        "{% if (message['role'] == 'user') != (ns.index % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate user/assistant, not ' ~ message.role) }}{% endif %}"
        "{% set ns.index = ns.index + 1 %}"
        "{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + (ns.system if loop.last else '') + message['content'] + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}"
        "{{ ' ' + message['content'].strip() + eos_token }}"
        "{% endif %}{% endfor %}"),
    "features": (
        "{%- macro shout(text, mark='!') -%}{{ text.upper() }}{{ mark }}{%- endmacro %}\n"
        "{% for m in messages %}\n"
        "  {% if m.content.startswith('  ') and m.content.endswith('\\n') %}\n"
        "[{{ m.content.strip() }}|{{ m.content.lstrip() | length }}|{{ m.content.rstrip('\\n') }}]\n"
        "  {% endif %}\n"
        "{{ loop.index }}/{{ loop.length }} {{ m | tojson }} {{ shout(m.role) }}"
        " {{ m.content.split()[-1] }} {{ m.content.replace('i', 'ı') }} {{ m.get('name', 'none') }}\n"
        "{% endfor %}\n"
        "{{ {'b': 1, 'a': [true, none, 2.5, 'é\\n']} | tojson }}\n"
        "{{ {'b': {}, 'a': [1, {'c': 'd'}]} | tojson(indent=2) }}\n"
        "{{ messages | map(attribute='role') | join(', ') }} {{ messages[-1]['role'] }}\n"
        "{{ 7 // 2 }} {{ 7 % 3 }} {{ 'x' ~ 1 }} {{ range(3) | list | length }} {{ ([1, 2] + [3]) | length }}\n"
        "{% for key, value in {'k': 'v'}.items() %}{{ key }}={{ value }}{% endfor %}\n"
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'assistant' %}{% break %}"
        "{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }} {{ undefined_name }}|\n"
        "{%- generation -%} answer {%- endgeneration -%}\n"
        "{# a comment #}   {{ 'yes' if add_generation_prompt else 'no' }}   \n"),
}


class Generation(jinja2.ext.Extension):
    """`{% generation %}`: its body."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def refuse(message):
    raise jinja2.exceptions.TemplateError(message)


def to_json(value, indent=None):
    return json.dumps(value, ensure_ascii=False, indent=indent)


def render(source, messages, prompt):
    """As Hugging Face's apply_chat_template does it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    messages = [{"role": role, "content": content} for role, content in messages]
    try:
        return {"text": environment.from_string(source).render(
            messages=messages, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>",
            tools=None, documents=None)}
    except jinja2.exceptions.TemplateError as error:
        return {"refused": error.message}


def rendered(source):
    return [{"messages": messages, "add_generation_prompt": prompt} | render(source, messages, prompt)
            for messages in CONVERSATIONS.values() for prompt in (False, True)]


# --- main --------------------------------------------------------------------------------------


def of_models(folder, texts):
    """Ids of the real vocabularies, counts and digests of the long texts; and templates."""
    tokens, templates = {}, {}
    for name, pre in MODELS.items():
        tokenizer, template = from_gguf(Path(folder) / name, pre)
        long = {}
        for kind in ("en", "zh", "code"):
            got = ids(tokenizer, (Path(texts) / f"eval_{kind}.txt").read_bytes().decode())
            long[f"eval_{kind}.txt"] = [len(got), fnv1a(got)]
        short = [[text, ids(tokenizer, text)] for text in TEXTS]
        tokens[name] = {"long": long, "short": short}
        templates[name] = rendered(template)
    return tokens, templates


def write(name, value):
    lines = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    (HERE / name).write_text(lines + "\n")
    print(name, len(lines), "bytes")


def main():
    if len(sys.argv) == 4:
        tokens, templates = of_models(*sys.argv[2:])
    else:
        tokens = json.loads((HERE / "tokens.json").read_text())["models"]
        templates = json.loads((HERE / "templates.json").read_text())["models"]
    write("tokens.json", {"fixture": fixture(sys.argv[1]), "sentencepiece": sentencepiece(), "models": tokens})
    own = {name: {"source": source, "cases": rendered(source)} for name, source in TEMPLATES.items()}
    write("templates.json", {"own": own, "models": templates})


main()
