#!/usr/bin/env python3
"""Golden dequantised blocks and tensor digests, from the `gguf` package.

usage: blocks.py golden [OUT.json]     write golden blocks (default: blocks.json beside this file)
       blocks.py digest MODEL.gguf     print "NAME TYPE HEX" for every tensor, in tensor-table order
needs: pip install numpy gguf blake3

HEX is the BLAKE3 digest of the tensor's weights as little-endian float32 bytes, row after row, as
`gguf.quants.dequantize` gives them; README.md describes blocks.json.
"""
import argparse
import json
import pathlib
import sys

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Type
from gguf.quants import dequantize

SEED = 20240607
# For every type of fixed blocks: byte offsets of its fp16 scale and, where it has one, fp16 minimum.
SCALES = {
    'Q4_0': (0, None), 'Q4_1': (0, 2), 'Q5_0': (0, None), 'Q5_1': (0, 2), 'Q8_0': (0, None), 'IQ4_NL': (0, None),
    'Q2_K': (80, 82), 'Q3_K': (108, None), 'Q4_K': (0, 2), 'Q5_K': (0, 2), 'Q6_K': (208, None),
    'TQ1_0': (52, None), 'TQ2_0': (64, None),
}
# What the "lowest" block holds besides zero codes: a byte range and its filling, sub-scales and sub-minima at
# their largest (Q6_K's are signed), or for Q8_0, whose codes are signed, the lowest code.
LOWEST = {'Q8_0': (2, 34, 0x80), 'Q2_K': (0, 16, 0xFF), 'Q3_K': (96, 108, 0xFF), 'Q4_K': (4, 16, 0xFF),
          'Q5_K': (4, 16, 0xFF), 'Q6_K': (192, 208, 0x7F)}
# 16-bit floats worth a look: zeros, subnormals, the ends of the normal range, ones, infinities.
EDGES = {
    'F16': [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x8400, 0x3C00, 0xBC00, 0x3555, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00],
    'BF16': [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x807F, 0x0080, 0x8080, 0x3F80, 0xBF80, 0x3EAB, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80],
}
INFINITY = {'F16': 0x7C00, 'BF16': 0x7F80}


def put_half(block, offset, value):
    """Writes `value` as little-endian fp16 at `offset`, where the type has such a field."""
    if offset is not None:
        block[offset:offset + 2] = np.array([value], '<f2').view(np.uint8)


def cases_of_blocks(name, rng):
    """Yields (label, bytes) of single blocks of a block type."""
    size = GGML_QUANT_SIZES[Type[name]][1]
    scale, minimum = SCALES[name]

    def block(codes, d, m):
        b = np.array(codes, np.uint8)
        put_half(b, scale, d)
        put_half(b, minimum, m)
        return b

    filled = lambda byte: np.full(size, byte, np.uint8)
    for i in range(3):
        # Scales of both signs, about as large as in models.
        d, m = rng.normal(0, 0.02, 2)
        yield f'random{i}', block(rng.integers(0, 256, size), d, m)
    yield 'subnormal', block(rng.integers(0, 256, size), 2.0 ** -24, 3 * 2.0 ** -24)
    yield 'zero', filled(0x00)
    yield 'ones', block(filled(0xFF), 1.0, 1.0)
    yield 'negative', block(filled(0xFF), -65504.0, -65504.0)
    lowest = filled(0x00)
    first, last, filling = LOWEST.get(name, (0, 0, 0))
    lowest[first:last] = filling
    yield 'lowest', block(lowest, 65504.0, 65504.0)


def cases_of_halves(name, rng):
    """Yields (label, bytes) of short rows of a 16-bit float type; no NaN, whose payload is nobody's promise."""
    infinity = INFINITY[name]
    bits = rng.integers(0, 1 << 16, 64).astype('<u2')
    yield 'random0', bits[bits & 0x7FFF < infinity][:32].view(np.uint8)
    yield 'edges', np.array(EDGES[name], '<u2').view(np.uint8)


def dequantised(name, raw):
    values = dequantize(np.ascontiguousarray(raw).reshape(1, -1), Type[name])
    return np.ascontiguousarray(values, '<f4').reshape(-1)


def write_golden(out):
    rng = np.random.default_rng(SEED)
    types = []
    for name in ['F16', 'BF16', *SCALES]:
        weights, size = GGML_QUANT_SIZES[Type[name]]
        cases = cases_of_blocks(name, rng) if name in SCALES else cases_of_halves(name, rng)
        blocks = []
        for label, raw in cases:
            values = dequantised(name, raw)
            assert len(values) * size == len(raw) * weights and not np.isnan(values).any(), (name, label)
            blocks.append({'label': label, 'bytes': raw.tobytes().hex(), 'f32': values.tobytes().hex()})
        types.append({'name': name, 'id': int(Type[name]), 'block_weights': weights, 'block_bytes': size, 'blocks': blocks})
    # One block a line, so that a difference between two versions can be read.
    text = ',\n'.join(
        '{%s,"blocks":[\n%s\n]}' % (json.dumps({k: v for k, v in t.items() if k != 'blocks'})[1:-1],
                                    ',\n'.join(json.dumps(b) for b in t['blocks']))
        for t in types)
    out.write_text(f'{{"seed":{SEED},"types":[\n{text}\n]}}\n')
    print(f'{out}: {len(types)} types, {sum(len(t["blocks"]) for t in types)} blocks, {out.stat().st_size} bytes')


def print_digests(path, chunk_weights=1 << 23):
    from blake3 import blake3
    from gguf import GGUFReader
    for tensor in GGUFReader(path).tensors:
        rows = tensor.data.reshape(-1, tensor.data.shape[-1])
        step = max(1, chunk_weights // int(tensor.shape[0]))
        digest = blake3()
        for first in range(0, len(rows), step):
            values = dequantize(rows[first:first + step], tensor.tensor_type)
            digest.update(np.ascontiguousarray(values, '<f4').tobytes())
        print(tensor.name, tensor.tensor_type.name, digest.hexdigest(), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True)
    golden = commands.add_parser('golden', help='write golden blocks')
    golden.add_argument('out', nargs='?', type=pathlib.Path, default=pathlib.Path(__file__).with_name('blocks.json'))
    digest = commands.add_parser('digest', help='print a digest of every dequantised tensor')
    digest.add_argument('model')
    args = parser.parse_args()
    if args.command == 'golden':
        write_golden(args.out)
    else:
        print_digests(args.model)


if __name__ == '__main__':
    sys.exit(main())
