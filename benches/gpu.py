#!/usr/bin/env python3
"""The GPU figures of docs/benchmarks.md and docs/gpu-kernels.md beside PyTorch's, in the same run on the same card. Needs torch with CUDA.

    python3 benches/gpu.py attention --wush target/release/wush      the attention kernel, cuDNN's and flash's
    python3 benches/gpu.py forward --wush target/release/wush        a calibration of the Qwen3-8B shape, and torch's forward pass of it, compiled
    python3 benches/gpu.py checkpoint --shape qwen3-8b DIR           random weights of that shape and DIR.tokens.json, for `wush convert DIR`
    python3 benches/gpu.py statistics A.safetensors B.safetensors    by how much the statistics of two runs differ, tensor by tensor

torch runs random weights of the shape: projections, causal attention through cuDNN, gate, norms, RoPE and residuals of every layer in bf16, no
statistics; one warm-up, then the median. Rates of attention count 4 d operations for each pair of a query and a key that it reads.
"""
import argparse
import json
import statistics
import struct
import subprocess
import sys
from array import array
from pathlib import Path

SHAPE = {"hidden": 4096, "heads": 32, "kv": 8, "dim": 128, "inner": 12288, "layers": 36, "vocabulary": 151936}
TOKENS = 32768
LAUNCHES = 5
SEED = 1


def wush(args, *command):
    """The report of a benchmark of the program."""
    done = subprocess.run([args.wush, "bench", *command, "--format", "json"], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"failed: wush bench {' '.join(command)}")
    return json.loads(done.stdout)


def row(what, ours, theirs):
    print(f"| {what} | {ours} | {theirs} |", flush=True)


def seconds(torch, work, launches=LAUNCHES):
    """The median launch, by the device's clock."""
    work()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(launches)]
    for start, end in marks:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks) / 1e3


def attention(args):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    report = wush(args, "kernels")
    ours = next(row for row in report["rows"] if row["kernel"] == "attention")
    row("attention, 32/8 heads of 128, 32768 tokens", f"{ours['operations_per_second'] / 1e12:.0f} TFLOP/s", "torch")
    for dim, tokens in [(128, TOKENS), (64, TOKENS), (128, 4096)]:
        q, k, v = (torch.randn(1, heads, tokens, dim, device="cuda", dtype=torch.bfloat16) for heads in (32, 8, 8))
        operations = 2 * tokens * (tokens + 1) * dim * 32
        for name, backend in [("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)]:
            with sdpa_kernel(backend):
                run = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                row(f"{name}, {dim}, {tokens}", "", f"{operations / seconds(torch, run) / 1e12:.0f} TFLOP/s")


def forward(args):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    report = wush(args, "calibrate", "--sequences", "3")
    ours, ceilings = report["seconds_per_sequence"], report["ceilings"]
    row("wush, with statistics", f"{ours:.3f} s", f"{report['over_floor']['sustained']:.2f} x the floor, {report['peak'] / 2**30:.1f} GiB")
    torch.manual_seed(SEED)
    model, ids = Layers(torch), torch.randint(SHAPE["vocabulary"], (TOKENS,), device="cuda")
    step = torch.compile(model.layer)
    with torch.inference_mode(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        def run():
            x = model.embedding[ids]
            for weights in model.weights:
                x = step(x, weights)
        theirs = seconds(torch, run, 3)
    row("torch, compiled, without statistics", f"{theirs:.3f} s", f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    row("torch over wush", f"{theirs / ours:.2f}", f"sustained product {ceilings['matmul_sustained'] / 1e12:.0f} TFLOP/s")


class Layers:
    """A decoder of the shape with random weights."""

    def __init__(self, torch):
        self.torch = torch
        s = SHAPE
        make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02
        q, kv = s["heads"] * s["dim"], s["kv"] * s["dim"]
        self.embedding = make(s["vocabulary"], s["hidden"])
        self.weights = [
            (make(q, s["hidden"]), make(kv, s["hidden"]), make(kv, s["hidden"]), make(s["hidden"], q),
             make(s["inner"], s["hidden"]), make(s["inner"], s["hidden"]), make(s["hidden"], s["inner"]))
            for _ in range(s["layers"])
        ]
        angles = torch.outer(torch.arange(TOKENS), 1e6 ** (-torch.arange(0, s["dim"], 2) / s["dim"])).cuda()
        self.cos, self.sin = angles.cos(), angles.sin()

    def norm(self, x):
        wide = x.float()
        return (wide * self.torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def turned(self, x):
        """Heads `[tokens, heads, dim]`, normed and turned."""
        a, b = self.norm(x).float().chunk(2, -1)
        cos, sin = self.cos[:, None], self.sin[:, None]
        return self.torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def layer(self, x, weights):
        functional = self.torch.nn.functional
        q, k, v, o, gate, up, down = weights
        z = self.norm(x)
        heads = lambda w: functional.linear(z, w).unflatten(-1, (-1, SHAPE["dim"]))
        qkv = [self.turned(heads(q)), self.turned(heads(k)), heads(v)]
        qkv = [part.transpose(0, 1)[None] for part in qkv]
        out = functional.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
        x = x + functional.linear(out[0].transpose(0, 1).flatten(1), o)
        z = self.norm(x)
        return x + functional.linear(functional.silu(functional.linear(z, gate)) * functional.linear(z, up), down)


def checkpoint(args):
    """Shards of one layer each, and token ids: as large as the paper's calibration."""
    import torch

    torch.manual_seed(SEED)
    args.dir.mkdir()
    s = SHAPE
    q, kv = s["heads"] * s["dim"], s["kv"] * s["dim"]
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": s["hidden"], "num_hidden_layers": s["layers"],
        "num_attention_heads": s["heads"], "num_key_value_heads": s["kv"], "head_dim": s["dim"], "intermediate_size": s["inner"],
        "vocab_size": s["vocabulary"], "max_position_embeddings": 40960, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16", "eos_token_id": 0,
    }
    (args.dir / "config.json").write_text(json.dumps(config))
    shards = [{"model.embed_tokens.weight": [s["vocabulary"], s["hidden"]], "model.norm.weight": [s["hidden"]]},
              {"lm_head.weight": [s["vocabulary"], s["hidden"]]}]
    for layer in range(s["layers"]):
        tensors = {
            "input_layernorm": [s["hidden"]], "post_attention_layernorm": [s["hidden"]], "self_attn.q_norm": [s["dim"]],
            "self_attn.k_norm": [s["dim"]], "self_attn.q_proj": [q, s["hidden"]], "self_attn.k_proj": [kv, s["hidden"]],
            "self_attn.v_proj": [kv, s["hidden"]], "self_attn.o_proj": [s["hidden"], q], "mlp.gate_proj": [s["inner"], s["hidden"]],
            "mlp.up_proj": [s["inner"], s["hidden"]], "mlp.down_proj": [s["hidden"], s["inner"]],
        }
        shards.append({f"model.layers.{layer}.{name}.weight": shape for name, shape in tensors.items()})
    index = {}
    for i, tensors in enumerate(shards):
        name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        index |= dict.fromkeys(tensors, name)
        write_shard(torch, args.dir / name, tensors)
    (args.dir / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    ids = torch.randint(1, s["vocabulary"], (args.sequences, TOKENS)).tolist()
    args.dir.with_suffix(".tokens.json").write_text(json.dumps(ids))


def write_shard(torch, path, tensors):
    header, end = {}, 0
    for name, shape in tensors.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in tensors.values():
            values = torch.randn(*shape, device="cuda") * 0.02 if len(shape) > 1 else torch.ones(*shape, device="cuda")
            file.write(memoryview(values.bfloat16().cpu().view(torch.int16).numpy()))


def tensors_of(path):
    """f64 tensors of a safetensors file, by name."""
    data = Path(path).read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    found = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] == "F64":
            start, end = entry["data_offsets"]
            found[name] = array("d", data[8 + size + start : 8 + size + end])
    return found


def compare(args):
    """The largest ||a - b|| / ||b|| over the layers, for each kind of tensor."""
    a, b = map(tensors_of, args.files)
    both, kinds = a.keys() & b.keys(), lambda names: ", ".join(sorted({name.split(".", 2)[-1] for name in names}))
    if not both:
        sys.exit("the files hold different tensors")
    if a.keys() ^ b.keys():
        print(f"in one file alone: {kinds(a.keys() ^ b.keys())}")
    worst = {}
    for name in both:
        kind = name.split(".", 2)[-1]
        distance = sum((x - y) ** 2 for x, y in zip(a[name], b[name])) ** 0.5
        size = sum(y * y for y in b[name]) ** 0.5 or 1.0
        worst[kind] = max(worst.get(kind, (0.0, "")), (distance / size, name))
    for kind, (error, name) in sorted(worst.items()):
        row(kind, f"{error:.3g}", name)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in [("attention", attention), ("forward", forward)]:
        command = commands.add_parser(name)
        command.add_argument("--wush", required=True)
        command.set_defaults(run=run)
    command = commands.add_parser("checkpoint")
    command.add_argument("dir", type=Path)
    command.add_argument("--shape", choices=["qwen3-8b"], default="qwen3-8b")
    command.add_argument("--sequences", type=int, default=128)
    command.set_defaults(run=checkpoint)
    command = commands.add_parser("statistics")
    command.add_argument("files", nargs=2)
    command.set_defaults(run=compare)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
