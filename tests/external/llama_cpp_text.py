#!/usr/bin/env python3
"""A bundle in unmodified llama.cpp: its converter, the base's greedy text, and what a quantized cache costs.

    python3 llama_cpp_text.py BASE BUNDLE [BUNDLE ...] [--text FILE] [--windows N] [--tokens N] [--caches q4_0,f16:q4_0]

Converts the directories with llama.cpp's convert_hf_to_gguf.py to f32 and continues some prompts greedily by 32 tokens each, on the CPU over an f16
cache; exits 1 unless every BUNDLE gives BASE's tokens. With --text also, as measured, no limit: over N windows of FILE the mean NLL and the mean KL
divergence from BASE over an f16 cache, of every model and cache, with llama.cpp's rotation of quantized caches and without
(LLAMA_ATTN_ROT_DISABLE). Prints one JSON line. Every model and cache is a process of its own. The library is the one inside xllamacpp's wheel, the
converter comes out of the source of llama-cpp-python, of which nothing is built; see environment.py.
"""
import argparse
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from environment import enter

LIBRARY = "xllamacpp==2026.10.11549"
CONVERTER = "llama-cpp-python==0.3.36"
PROMPTS = ["The sky is blue because", "In the year 1815,", "def fibonacci(n):", "A recipe for bread: take"]
N_NEW = 32
# ggml's numbers of the types of a cache.
TYPES = {"f16": 1, "q4_0": 2, "q8_0": 8}


class ModelParams(ctypes.Structure):
    """Only passed on as the library gives them, in more room than they need."""

    _fields_ = (("all", ctypes.c_uint64 * 64),)


class ContextParams(ctypes.Structure):
    """The fields of llama.h up to those that are set here; what follows is passed on as the library gives it."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in "n_ctx n_batch n_ubatch n_seq_max n_rs_seq n_outputs_max n_outputs_max_per_seq".split()),
        *((name, ctypes.c_int32) for name in "n_threads n_threads_batch ctx_type rope_scaling_type pooling_type attention_type".split()),
        ("flash_attn_type", ctypes.c_int32), ("rope", ctypes.c_float * 6), ("yarn_orig_ctx", ctypes.c_uint32), ("defrag", ctypes.c_float),
        ("callback", ctypes.c_void_p * 2), ("type_k", ctypes.c_int32), ("type_v", ctypes.c_int32), ("rest", ctypes.c_uint64 * 64),
    )


class Batch(ctypes.Structure):
    """Tokens of one sequence at its next positions, which is what null pointers mean; logits of all."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32)), ("embd", ctypes.c_void_p), ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.c_void_p), ("seq_id", ctypes.c_void_p), ("logits", ctypes.c_char_p),
    )


def library():
    """llama.cpp's C API, which xllamacpp's extension exports."""
    found = ctypes.CDLL(Path(importlib.util.find_spec("xllamacpp").origin).with_name("xllamacpp.abi3.so"))
    pointer = ctypes.c_void_p
    for name, result, *arguments in (
        ("backend_init", None), ("model_default_params", ModelParams), ("context_default_params", ContextParams),
        ("model_load_from_file", pointer, ctypes.c_char_p, ModelParams), ("init_from_model", pointer, pointer, ContextParams),
        ("model_get_vocab", pointer, pointer), ("vocab_n_tokens", ctypes.c_int32, pointer),
        ("get_memory", pointer, pointer), ("memory_clear", None, pointer, ctypes.c_bool),
        ("decode", ctypes.c_int32, pointer, Batch), ("get_logits", pointer, pointer),
    ):
        function = getattr(found, f"llama_{name}")
        function.restype, function.argtypes = result, arguments
    return found


class Model:
    def __init__(self, gguf, cache, n_ctx):
        self.llama = library()
        self.llama.llama_backend_init()
        self.model = self.llama.llama_model_load_from_file(os.fsencode(gguf), self.llama.llama_model_default_params())
        params = self.llama.llama_context_default_params()
        if (params.n_ctx, params.type_k, params.type_v) != (512, TYPES["f16"], TYPES["f16"]):
            sys.exit("this llama.cpp has other parameters of a context")
        keys, _, values = cache.partition(":")
        params.n_ctx = params.n_batch = params.n_ubatch = n_ctx
        # Its threads spin while they wait for each other: on a machine that does other things as well, one is the fastest.
        params.n_threads = params.n_threads_batch = 1
        # A quantized cache of values needs flash attention.
        params.flash_attn_type, params.type_k, params.type_v = 1, TYPES[keys], TYPES[values or keys]
        self.context = self.llama.llama_init_from_model(self.model, params) if self.model else None
        if not self.context:
            sys.exit("no model, or no context")
        self.n_vocab = self.llama.llama_vocab_n_tokens(self.llama.llama_model_get_vocab(self.model))

    def reset(self):
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)

    def logits(self, ids):
        """Logits `[tokens, vocabulary]` of the sequence's next tokens, float32."""
        import numpy as np

        batch = Batch(len(ids), (ctypes.c_int32 * len(ids))(*ids), None, None, None, None, b"\1" * len(ids))
        if status := self.llama.llama_decode(self.context, batch):
            sys.exit(f"llama_decode: {status}")
        found = (ctypes.c_float * (len(ids) * self.n_vocab)).from_address(self.llama.llama_get_logits(self.context))
        return np.frombuffer(found, np.float32).reshape(len(ids), self.n_vocab).copy()


def child_texts(gguf, args):
    model, found = Model(gguf, "f16", 128), []
    for ids in json.loads(args.ids):
        model.reset()
        tokens = [int(model.logits(ids)[-1].argmax())]
        while len(tokens) < N_NEW:
            tokens.append(int(model.logits(tokens[-1:])[-1].argmax()))
        found.append(tokens)
    print("RESULT " + json.dumps(found), flush=True)


def child_logits(gguf, args):
    """Log probabilities of every position but the last of all windows, to a file."""
    import numpy as np

    windows = json.loads(args.ids)
    model, found = Model(gguf, args.cache, args.tokens), []
    for window in windows:
        model.reset()
        logits = model.logits(window)[:-1].astype(np.float64)
        logits -= logits.max(1, keepdims=True)
        found.append((logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32))
    np.save(args.out, np.stack(found))
    print("RESULT " + json.dumps(len(found)), flush=True)


def run(gguf, *options, env=None):
    command = [sys.executable, __file__, gguf, "--child", *options]
    done = subprocess.run(command, env=os.environ | (env or {}), capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        sys.exit(f"{gguf}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return json.loads(found[0].removeprefix("RESULT "))


def converter(folder):
    """llama.cpp's converter, out of the package's source."""
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
    subprocess.run([*download, "-d", folder, CONVERTER], check=True)
    source = next(folder.glob("*.tar.gz"))
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    source.unlink()
    return next(folder.glob("*/vendor/llama.cpp/convert_hf_to_gguf.py"))


def convert(script, model, folder):
    out = folder / f"{model.name}.gguf"
    subprocess.run([sys.executable, script, model, "--outfile", out, "--outtype", "f32"], check=True, capture_output=True)
    return out


def measure(args, tokenizer, ggufs, folder):
    """NLL and KL divergence of every model, cache, and rotation."""
    import numpy as np

    ids = tokenizer(args.text.read_text()[: 8 * args.windows * args.tokens], add_special_tokens=False).input_ids
    windows = np.array(ids[: args.windows * args.tokens]).reshape(args.windows, args.tokens)

    def log_probabilities(gguf, cache, rotated):
        out = folder / "log_probabilities.npy"
        options = ["--ids", json.dumps(windows.tolist()), "--tokens", str(args.tokens), "--cache", cache, "--out", out]
        run(gguf, *options, env={} if rotated else {"LLAMA_ATTN_ROT_DISABLE": "1"})
        return np.load(out)

    base, rows = log_probabilities(ggufs[0], "f16", True), []
    for gguf in ggufs:
        for cache, rotated in [("f16", True), *((cache, rotated) for cache in args.caches.split(",") for rotated in (True, False))]:
            found = log_probabilities(gguf, cache, rotated)
            nll = -np.take_along_axis(found, windows[:, 1:, None], 2).astype(np.float64).mean()
            divergence = mean_divergence(base, found)
            rows.append({"model": gguf.stem, "cache": cache, "rotated": rotated and cache != "f16", "nll": nll, "kl": divergence})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def mean_divergence(base, found):
    """Mean over positions of KL(base ‖ found), summed in float64."""
    import numpy as np

    positions = (row for pair in zip(base, found, strict=True) for row in zip(*pair, strict=True))
    return float(np.mean([np.exp(b, dtype=np.float64) @ (b.astype(np.float64) - f) for b, f in positions]))


def main(args):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.models[0])
    prompts = json.dumps([tokenizer(prompt).input_ids for prompt in PROMPTS])
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folder = Path(scratch)
        script = converter(folder)
        ggufs = [convert(script, model.resolve(), folder) for model in args.models]
        expected, *others = [run(gguf, "--ids", prompts) for gguf in ggufs]
        same = {model.name: [a == b for a, b in zip(expected, found, strict=True)] for model, found in zip(args.models[1:], others, strict=True)}
        ok = bool(same) and all(map(all, same.values()))
        report = {"tokens each": N_NEW, "the base's tokens": same, "first": tokenizer.decode(expected[0])}
        if args.text:
            report["rows"] = measure(args, tokenizer, ggufs, folder)
    print(json.dumps(report | {"ok": ok}))
    return 0 if ok else 1


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--caches", default="q4_0,f16:q4_0", help="of keys and values, or keys:values")
    parser.add_argument("--scratch", type=Path, help="a folder for GGUF files and logits")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    parser.add_argument("--ids", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    if arguments.child:
        (child_logits if arguments.out else child_texts)(arguments.models[0], arguments)
    else:
        enter("llama-cpp", LIBRARY, "torch", "transformers", "sentencepiece", "gguf", "protobuf")
        sys.exit(main(arguments))
