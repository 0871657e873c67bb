#!/usr/bin/env python3
"""The decode kernel of wush-kv's packed cache beside PyTorch's attention over a bfloat16 cache, and its encoder. Needs wush-kv, a GPU, triton.

    python3 benches/kv_decode.py [--bits 2] [--shapes 1x4096,8x32768] [--tile TOKENS,PARTS]

32 query and 8 KV heads of 128, one new query a sequence, 64 tokens of sink and 260 of recent window beside the packed ones; the shapes are
sequences and tokens. A call's time is that of a captured graph of calls over inputs of their own, more than the card's cache holds, so neither
launches from Python nor cached reads count. Random words: what is in them changes nothing. Bytes are those that must be read.
"""
import argparse
import statistics

import torch
from torch.nn.functional import scaled_dot_product_attention
from wush_kv import Codec
from wush_kv.transformers.kernels import attend
from wush_kv.transformers.packer import Packer

HEADS, KV_HEADS, DIM, SINK, RECENT = 32, 8, 128, 64, 260
REPLAYS = 20
# Scale 2^-7 and zero point 1.5, in bfloat16.
SCALES = 0x3FC03C00
# Bytes of all inputs of a graph: several times the 60 MB of an H200's cache.
COLD_BYTES = 4e8
DEVICE = torch.device("cuda")


def microseconds(calls):
    """Of one call, the median of replays."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def tokens(batch, n):
    return torch.randn(batch, KV_HEADS, n, DIM, dtype=torch.bfloat16, device=DEVICE)


def stored(batch, n_tokens, bits):
    n_words = Codec(DIM, bits).n_bytes // 4 - 1
    packed = torch.randint(-(2**31), 2**31 - 1, (batch, KV_HEADS, n_tokens, n_words), dtype=torch.int32, device=DEVICE)
    scales = torch.full((batch, KV_HEADS, n_tokens), SCALES, dtype=torch.int32, device=DEVICE)
    return attend.Stored(tokens(batch, SINK), packed, scales, tokens(batch, RECENT))


def packed_attention(batch, n_tokens, bits):
    """Microseconds, and bytes read."""
    rows = torch.tensor([[0] * batch, [n_tokens] * batch], dtype=torch.int32, device=DEVICE)
    places = attend.Places(rows, SINK, 0, n_tokens, SINK + n_tokens, SINK + n_tokens + RECENT - 1)
    query = torch.randn(batch, HEADS, 1, DIM, dtype=torch.bfloat16, device=DEVICE)
    n_bytes = sum(x.nbytes for x in vars(stored(batch, n_tokens, bits)).values()) * 2
    pairs = [[stored(batch, n_tokens, bits) for _ in range(2)] for _ in range(max(2, int(COLD_BYTES / n_bytes)))]
    return microseconds([lambda kv=kv: attend.attend_packed(query, *kv, bits, places, None, DIM**-0.5, None) for kv in pairs]), n_bytes


def plain_attention(batch, n_tokens):
    """The same of a bfloat16 cache."""
    query = torch.randn(batch, HEADS, 1, DIM, dtype=torch.bfloat16, device=DEVICE)
    n_bytes = 4 * batch * KV_HEADS * (n_tokens + SINK + RECENT) * DIM
    pairs = [[tokens(batch, n_tokens + SINK + RECENT) for _ in range(2)] for _ in range(max(2, int(COLD_BYTES / n_bytes)))]
    return microseconds([lambda kv=kv: scaled_dot_product_attention(query, *kv, enable_gqa=True) for kv in pairs]), n_bytes


def packing(batch, n_tokens, bits):
    """Microseconds to quantize keys of one layer, with error feedback."""
    lower = torch.randn(KV_HEADS, DIM, DIM).tril(-1) * 0.3 + torch.eye(DIM)
    packer = Packer(Codec(DIM, bits, method="quest-wide", feedback=lower.numpy()), lower)
    x = tokens(batch, n_tokens)
    return microseconds([lambda: packer.pack(x)] * 3)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=2)
    parser.add_argument("--shapes", default="1x4096,1x32768,8x4096,8x32768")
    parser.add_argument("--tile", help="another tile than the package's: tokens, parts a multiprocessor")
    args = parser.parse_args()
    if args.tile:
        attend.BLOCK, attend.PROGRAMS_PER_PROCESSOR = map(int, args.tile.split(","))
    print(f"{torch.cuda.get_device_name()}, {args.bits} bits\n\n| sequences x tokens | packed, µs | TB/s | bfloat16, µs | TB/s |\n|---|---|---|---|---|")
    for shape in args.shapes.split(","):
        batch, n_tokens = map(int, shape.split("x"))
        figures = (packed_attention(batch, n_tokens, args.bits), plain_attention(batch, n_tokens))
        print(f"| {shape} |" + "".join(f" {us:.1f} | {n_bytes / us / 1e6:.2f} |" for us, n_bytes in figures), flush=True)
    for batch, n_tokens in ((1, 8), (8, 8), (1, 4096), (1, 32768)):
        print(f"packing {batch} x {n_tokens}: {packing(batch, n_tokens, args.bits):.1f} µs", flush=True)


if __name__ == "__main__":
    main()
