#!/usr/bin/env python3
"""A plain fp32 forward pass in numpy: the reference that logits are compared with.

usage: forward.py tokens  MODEL --texts DIR [--n 200] --out TOKENS.json
       forward.py logits  MODEL --tokens TOKENS.json --out REF.npy [--dtype float64]
       forward.py compare REF.npy --tokens TOKENS.json [--ours FILE.bin ...] [--llama MODEL.gguf] [--json OUT.json]
       forward.py golden  MODEL OUT.json
needs: pip install numpy gguf tokenizers (and llama-cpp-python for compare --llama)

MODEL is a GGUF file (architectures llama and qwen2, every tensor type that the `gguf` package dequantises)
or a directory as on a model hub (config.json, *.safetensors, tokenizer.json).
TOKENS.json is {"en": [ids], "zh": [ids], "code": [ids]}; each text starts at position 0. Logits are float32,
one row of the vocabulary's length per position, the texts' rows one after the other in that order; --ours
reads the same rows as raw little-endian float32. Weights are dequantised one matrix at a time, so a model
needs far less memory than its fp32 weights.
"""
import argparse
import functools
import glob
import json
import math
import os
import sys

import numpy as np

TIE = 1e-4  # logits closer than this are a tie: no fp32 order of summation decides between them

# A text for the golden logits of the test models, of about 48 tokens of theirs.
GOLDEN_TEXT = ('The ferry leaves at seven and reaches the island before noon.\n'
               '小河从山上流下来。\n'
               'def area(w, h):\n    return w * h\n')


# ---------------------------------------------------------------- model files

class GgufModel:
    """A GGUF file: its configuration, and its matrices under their GGUF names."""

    def __init__(self, path):
        from gguf import GGUFReader
        self.reader = GGUFReader(path)
        self.tensors = {t.name: t for t in self.reader.tensors}
        arch = self.meta('general.architecture')
        if arch not in ('llama', 'qwen2'):
            sys.exit(f'{path}: architecture {arch!r} is not supported (llama and qwen2 are)')
        if (scaling := self.meta(f'{arch}.rope.scaling.type', 'none')) != 'none':
            sys.exit(f'{path}: rope scaling {scaling!r} is not supported')
        get = lambda key, default=None: self.meta(f'{arch}.{key}', default)
        self.layers, self.dim = get('block_count'), get('embedding_length')
        self.heads = get('attention.head_count')
        self.kv_heads = get('attention.head_count_kv', self.heads)
        self.head_dim = get('attention.key_length', self.dim // self.heads)
        self.rope_dim = get('rope.dimension_count', self.head_dim)
        self.theta = get('rope.freq_base', 10000.0)
        self.eps = get('attention.layer_norm_rms_epsilon')
        # llama files carry query and key rows permuted so that a rotated pair is adjacent.
        self.adjacent_pairs = arch == 'llama'
        self.vocab = int(self.tensors['token_embd.weight'].shape[1])
        self.output = 'output.weight' if 'output.weight' in self.tensors else 'token_embd.weight'

    def meta(self, key, default=None):
        field = self.reader.fields.get(key)
        return default if field is None else field.contents()

    def has(self, name):
        return name in self.tensors

    def rows(self, name, which=slice(None)):
        """Rows of a matrix (or a whole vector) as float32."""
        from gguf.quants import dequantize
        tensor = self.tensors[name]
        return dequantize(np.ascontiguousarray(tensor.data[which]), tensor.tensor_type).astype(np.float32, copy=False)

    def tokenizer(self):
        """The byte-level BPE of the file, through the `tokenizers` package."""
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
        quoted = "'s|'t|'re|'ve|'m|'ll|'d"
        patterns = {
            'qwen2': [Regex(rf"(?i:{quoted})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
                            r"|\s*[\r\n]+|\s+(?!\S)|\s+")],
            'smollm': [Regex(r'\p{N}'), Regex(rf"{quoted}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+")],
        }
        pre = self.meta('tokenizer.ggml.pre')
        if self.meta('tokenizer.ggml.model') != 'gpt2' or pre not in patterns:
            sys.exit(f'tokenizer {pre!r} is not supported: give the token ids in a file')
        tokens = self.meta('tokenizer.ggml.tokens')
        merges = [tuple(m.split(' ')) for m in self.meta('tokenizer.ggml.merges')]
        tok = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
        tok.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(p, 'isolated') for p in patterns[pre]]
            + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        tok.decoder = decoders.ByteLevel()
        kinds = self.meta('tokenizer.ggml.token_type')
        tok.add_special_tokens([AddedToken(t, special=True) for t, k in zip(tokens, kinds) if k == 3])
        return tok


class HubModel:
    """A directory as on a model hub; matrices are asked for by their GGUF names."""
    NAMES = {'token_embd': 'model.embed_tokens', 'output_norm': 'model.norm', 'output': 'lm_head',
             'attn_norm': 'input_layernorm', 'ffn_norm': 'post_attention_layernorm',
             'attn_q': 'self_attn.q_proj', 'attn_k': 'self_attn.k_proj', 'attn_v': 'self_attn.v_proj',
             'attn_output': 'self_attn.o_proj', 'ffn_gate': 'mlp.gate_proj', 'ffn_up': 'mlp.up_proj',
             'ffn_down': 'mlp.down_proj'}
    adjacent_pairs = False

    def __init__(self, path):
        self.path = path
        with open(os.path.join(path, 'config.json'), encoding='utf8') as f:
            config = json.load(f)
        if config['model_type'] not in ('llama', 'qwen2') or config.get('rope_scaling'):
            sys.exit(f'{path}: only llama and qwen2 without rope scaling are supported')
        self.layers, self.dim = config['num_hidden_layers'], config['hidden_size']
        self.heads = config['num_attention_heads']
        self.kv_heads = config.get('num_key_value_heads') or self.heads
        self.head_dim = self.rope_dim = config.get('head_dim') or self.dim // self.heads
        self.theta, self.eps = config.get('rope_theta', 10000.0), config['rms_norm_eps']
        self.output = 'token_embd.weight' if config.get('tie_word_embeddings') else 'output.weight'
        self.tensors = {}
        for file in sorted(glob.glob(os.path.join(path, '*.safetensors'))):
            # 8 bytes of header length, the header in JSON, then the data that its offsets point into.
            data = np.memmap(file, np.uint8, 'r')
            end = 8 + int(data[:8].view('<u8')[0])
            header = json.loads(data[8:end].tobytes())
            header.pop('__metadata__', None)
            for name, t in header.items():
                first, last = t['data_offsets']
                self.tensors[name] = (t['dtype'], t['shape'], data[end + first:end + last])
        self.vocab = self.tensors['model.embed_tokens.weight'][1][0]

    def stored_name(self, name):
        *block, part, kind = name.split('.')
        return '.'.join([*(['model.layers', block[1]] if block else []), self.NAMES.get(part, part), kind])

    def has(self, name):
        return self.stored_name(name) in self.tensors

    def rows(self, name, which=slice(None)):
        dtype, shape, raw = self.tensors[self.stored_name(name)]
        if dtype == 'BF16':
            bits = raw.view('<u2').reshape(shape)[which]
            return (bits.astype(np.uint32) << 16).view(np.float32)
        return raw.view({'F32': '<f4', 'F16': '<f2'}[dtype]).reshape(shape)[which].astype(np.float32)

    def tokenizer(self):
        from tokenizers import Tokenizer
        return Tokenizer.from_file(os.path.join(self.path, 'tokenizer.json'))


def open_model(path):
    return HubModel(path) if os.path.isdir(path) else GgufModel(path)


# ---------------------------------------------------------------- forward pass

def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps)) * weight


def rope_tables(model, length, dtype):
    """cos and sin, (positions, rope_dim / 2); the angles are computed in float64."""
    frequencies = model.theta ** -(np.arange(0, model.rope_dim, 2, dtype=np.float64) / model.rope_dim)
    if model.has('rope_freqs.weight'):
        frequencies /= model.rows('rope_freqs.weight')
    angles = np.arange(length)[:, None] * frequencies
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def rotate(x, cos, sin, adjacent):
    """Rotates the first rope_dim values of every head; x is (positions, heads, head_dim)."""
    half = cos.shape[1]
    cos, sin = cos[:len(x), None], sin[:len(x), None]
    first = slice(0, 2 * half, 2) if adjacent else slice(0, half)
    second = slice(1, 2 * half, 2) if adjacent else slice(half, 2 * half)
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def attend(q, k, v):
    """Causal grouped-query attention of one text: q (n, heads, head_dim), k and v (n, kv_heads, head_dim)."""
    n, heads, head_dim = q.shape
    k, v = (np.repeat(x, heads // x.shape[1], axis=1).transpose(1, 0, 2) for x in (k, v))
    scores = q.transpose(1, 0, 2) @ k.transpose(0, 2, 1) / q.dtype.type(math.sqrt(head_dim))
    scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return (p @ v).transpose(1, 0, 2).reshape(n, heads * head_dim)


def forward(model, texts, dtype=np.float32, progress=False):
    """Hidden states after the last norm, (positions of all texts, dim); the texts share one pass over the layers."""
    bounds = np.cumsum([0] + [len(t) for t in texts])
    spans = [slice(a, b) for a, b in zip(bounds, bounds[1:])]
    get = lambda name: model.rows(name).astype(dtype, copy=False)

    def linear(x, name):
        y = x @ get(f'{name}.weight').T
        return y + get(f'{name}.bias') if model.has(f'{name}.bias') else y

    cos, sin = rope_tables(model, max(map(len, texts)), dtype)
    x = model.rows('token_embd.weight', np.concatenate(texts)).astype(dtype, copy=False)
    for layer in range(model.layers):
        name = f'blk.{layer}.'
        h = rms_norm(x, get(name + 'attn_norm.weight'), model.eps)
        q = linear(h, name + 'attn_q').reshape(len(x), model.heads, model.head_dim)
        k = linear(h, name + 'attn_k').reshape(len(x), model.kv_heads, model.head_dim)
        v = linear(h, name + 'attn_v').reshape(len(x), model.kv_heads, model.head_dim)
        turn = functools.partial(rotate, cos=cos, sin=sin, adjacent=model.adjacent_pairs)
        mixed = np.concatenate([attend(turn(q[s]), turn(k[s]), v[s]) for s in spans])
        x = x + linear(mixed, name + 'attn_output')
        h = rms_norm(x, get(name + 'ffn_norm.weight'), model.eps)
        gate = linear(h, name + 'ffn_gate')
        # |gate| is a few hundred at most, so exp overflows, if ever, to the right limit.
        with np.errstate(over='ignore'):
            gate = gate / (1 + np.exp(-gate))
        x = x + linear(gate * linear(h, name + 'ffn_up'), name + 'ffn_down')
        if progress:
            print(f'layer {layer + 1}/{model.layers}', file=sys.stderr, flush=True)
    return rms_norm(x, get('output_norm.weight'), model.eps)


def logits_into(model, hidden, out, step=8192):
    """Writes hidden @ output.T to out, (positions, vocab), a group of vocabulary rows at a time."""
    for first in range(0, model.vocab, step):
        rows = slice(first, min(first + step, model.vocab))
        out[:, rows] = hidden @ model.rows(model.output, rows).astype(hidden.dtype, copy=False).T


# ---------------------------------------------------------------- comparison

def log_softmax(logits):
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def differences(ref, other, tokens, step=50):
    """Per text and overall: KL(ref || other) in float64, and top-1 disagreements, of which `at_ties` are where
    the reference itself has the other's choice within TIE of its own; `ties` counts the reference's tied positions."""
    kl, differs, excused, tied = [], [], [], []
    for first in range(0, len(ref), step):
        a, b = np.asarray(ref[first:first + step]), np.asarray(other[first:first + step])
        p, q = log_softmax(a), log_softmax(b)
        kl.append((np.exp(p) * (p - q)).sum(axis=-1))
        top, rows = a.argmax(axis=-1), np.arange(len(a))
        choice = b.argmax(axis=-1)
        differs.append(choice != top)
        excused.append((choice != top) & (a[rows, top] - a[rows, choice] < TIE))
        two = np.partition(a, -2, axis=-1)[:, -2:]
        tied.append(two[:, 1] - two[:, 0] < TIE)
    kl, differs, excused, tied = map(np.concatenate, (kl, differs, excused, tied))
    table, first, start = {}, 0, np.zeros(len(kl), bool)
    start[np.cumsum([0] + [len(t) for t in tokens.values()])[:-1]] = True
    for name, count in [(n, len(t)) for n, t in tokens.items()] + [('all', None)]:
        s = slice(None) if count is None else slice(first, first + count)
        first += count or 0
        # A text's first token can draw activations so large that 8 bits lose it: its KL alone may make the mean.
        later = kl[s][~start[s]]
        table[name] = {'positions': len(kl[s]), 'mean_kl': float(kl[s].mean()), 'mean_kl_later': float(later.mean()),
                       'median_kl': float(np.median(kl[s])), 'max_kl': float(kl[s].max()),
                       'top1_differs': int(differs[s].sum()), 'at_ties': int(excused[s].sum()), 'ties': int(tied[s].sum())}
    return table


def llama_logits(path, tokens, n_batch, threads):
    """llama.cpp's logits of the same ids, (positions, vocab), on an empty cache for every text."""
    try:
        import llama_cpp
    except ImportError:
        sys.exit('llama_cpp is not installed: `pip install llama-cpp-python` in a virtual environment')
    model = llama_cpp.Llama(path, n_ctx=512, n_batch=n_batch, n_threads=threads, n_threads_batch=threads,
                            logits_all=True, verbose=False)
    rows = []
    for ids in tokens.values():
        model.reset()
        model.eval(ids)
        rows.append(np.array(model.scores[:len(ids)], np.float32))
    about = f'llama-cpp-python {llama_cpp.__version__}: {llama_cpp.llama_print_system_info().decode().strip()}'
    return np.concatenate(rows), about


def print_table(name, table):
    for text, r in table.items():
        print(f'| {name} | {text} | {r["positions"]} | {r["mean_kl"]:.3e} | {r["mean_kl_later"]:.3e} '
              f'| {r["median_kl"]:.3e} | {r["max_kl"]:.3e} '
              f'| {r["top1_differs"]} | {r["at_ties"]} | {r["ties"]} |', flush=True)


# ---------------------------------------------------------------- commands

def read_tokens(path):
    with open(path, encoding='utf8') as f:
        return json.load(f)


def paragraph(text):
    """The text from the first paragraph that starts after a third of it, so that no model gets a file's opening."""
    start = len(text) // 3
    for end in ('\n\n', '\n'):
        found = text.find(end, start)
        if found >= 0:
            return text[found:].lstrip('\n')
    return text[start:]


def command_tokens(args):
    tok, out = open_model(args.model).tokenizer(), {}
    for name in ('en', 'zh', 'code'):
        with open(os.path.join(args.texts, f'eval_{name}.txt'), encoding='utf8') as f:
            # No token holds more than 16 characters on average, so this much text is enough.
            text = paragraph(f.read())[:16 * args.n]
        out[name] = tok.encode(text, add_special_tokens=False).ids[:args.n]
        print(f'{name}: {len(out[name])} tokens: {tok.decode(out[name][:12])!r}')
    with open(args.out, 'w', encoding='utf8') as f:
        json.dump(out, f)


def command_logits(args):
    model, tokens = open_model(args.model), read_tokens(args.tokens)
    hidden = forward(model, list(tokens.values()), np.dtype(args.dtype), progress=True)
    out = np.lib.format.open_memmap(args.out, 'w+', np.float32, (len(hidden), model.vocab))
    logits_into(model, hidden, out)
    out.flush()


def command_compare(args):
    ref, tokens, result = np.load(args.ref, mmap_mode='r'), read_tokens(args.tokens), {}
    if len(ref) != (count := sum(map(len, tokens.values()))):
        sys.exit(f'{args.ref}: {len(ref)} rows for {count} tokens: were they computed from {args.tokens}?')
    print('| logits | text | positions | mean KL | without first | median KL | max KL | top-1 differs | of these at ties | ties |')
    print('|---|---|---|---|---|---|---|---|---|---|')
    for path in args.ours:
        if os.path.getsize(path) != ref.size * 4:
            sys.exit(f'{path}: {os.path.getsize(path)} bytes, but {len(ref)} rows of {ref.shape[1]} float32 are {ref.size * 4}')
        name = os.path.basename(path)
        result[name] = differences(ref, np.memmap(path, '<f4', 'r', shape=ref.shape), tokens)
        print_table(name, result[name])
    if args.llama:
        for batch in (200, 1):
            logits, about = llama_logits(args.llama, tokens, batch, args.threads)
            name = f'llama.cpp n_batch {batch}'
            result[name] = differences(ref, logits, tokens)
            print_table(name, result[name])
        result['about'] = about
        print(f'\n{about}')
    if args.json:
        with open(args.json, 'w', encoding='utf8') as f:
            json.dump(result, f, indent=1)


def command_golden(args):
    model = open_model(args.model)
    ids = model.tokenizer().encode(GOLDEN_TEXT, add_special_tokens=False).ids
    # float64 from end to end, so that the file holds the right digits and not one machine's rounding.
    hidden = forward(model, [ids], np.float64)
    logits = np.empty((len(ids), model.vocab))
    logits_into(model, hidden, logits)
    top = np.argsort(-logits, axis=-1, kind='stable')[:, :8]
    peak = logits.max(axis=-1)
    logsumexp = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=-1))
    lines = [json.dumps({'ids': t.tolist(), 'logits': [float(f'{x:.9g}') for x in row[t]], 'logsumexp': float(f'{z:.9g}')})
             for t, row, z in zip(top, logits, logsumexp)]
    with open(args.out, 'w', encoding='utf8') as f:
        f.write(f'{{"text": {json.dumps(GOLDEN_TEXT)},\n"tokens": {json.dumps(ids)},\n"top": [\n' + ',\n'.join(lines) + '\n]}\n')
    print(f'{args.out}: {len(ids)} positions')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True)
    c = commands.add_parser('tokens', help='cut the texts into token ids')
    c.add_argument('model')
    c.add_argument('--texts', required=True, help='directory with eval_en.txt, eval_zh.txt and eval_code.txt')
    c.add_argument('--n', type=int, default=200, help='tokens of each text')
    c.add_argument('--out', required=True)
    c = commands.add_parser('logits', help='the reference logits of every position')
    c.add_argument('model')
    c.add_argument('--tokens', required=True)
    c.add_argument('--out', required=True)
    c.add_argument('--dtype', choices=['float32', 'float64'], default='float32', help='float64 shows the rounding of float32')
    c = commands.add_parser('compare', help='compare logits with the reference')
    c.add_argument('ref')
    c.add_argument('--tokens', required=True)
    c.add_argument('--ours', nargs='+', default=[], help='raw little-endian float32 rows')
    c.add_argument('--llama', help='GGUF to run in llama.cpp on the same tokens')
    c.add_argument('--threads', type=int, default=1, help='threads of llama.cpp (several wait for each other on a busy machine)')
    c.add_argument('--json', help='write the table here too')
    c = commands.add_parser('golden', help='golden logits of a small test model')
    c.add_argument('model')
    c.add_argument('out')
    args = parser.parse_args()
    globals()[f'command_{args.command}'](args)


if __name__ == '__main__':
    sys.exit(main())
