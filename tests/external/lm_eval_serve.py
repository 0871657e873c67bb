#!/usr/bin/env python3
"""lm-evaluation-harness' local-completions against `wush serve`, offline, on a task of local text.

    python3 lm_eval_serve.py WUSH BUNDLE TEXT [--characters N]

Scores one document of TEXT through the server at 16 and at 2 bits, in chunks of 16 with the windows of the paper's study, as lm_eval_kv.py
does it through transformers: its figures are those to compare with. 2 bits must change the perplexity, by less than a tenth. Prints one
JSON line. Installs lm-eval, see environment.py.
"""
import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import lm_eval_task
from environment import enter

CHUNK = ["--chunk", "16"]
WINDOWS = ["--sink", "16", "--keep", "128", "--flush", "16"]
LISTENING = "listening  on "


def run(folder, wush, bundle, bits):
    windows = WINDOWS if bits < 16 else []
    command = [wush, "serve", bundle, "--port", "0", "--kv-bits", str(bits), *CHUNK, *windows]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    address = next(line.strip().removeprefix(LISTENING) for line in server.stderr if line.startswith(LISTENING))
    arguments = f"model={bundle},base_url={address}/v1/completions,tokenizer={bundle},tokenized_requests=True,max_length=4096"
    out = folder / f"out-{bits}"
    options = ["--include_path", folder, "--output_path", out, "--model_args", arguments]
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", lm_eval_task.NAME, *options]
    try:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    finally:
        server.send_signal(signal.SIGTERM)
        server.stderr.read()
    assert server.wait() == 0, "the server did not end well"
    return lm_eval_task.result(out)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wush", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--characters", type=int, default=3000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        lm_eval_task.write(folder, args.text, args.characters)
        full, two = (run(folder, args.wush, args.bundle, bits) for bits in (16, 2))
    ok = lm_eval_task.MOVED < abs(two / full - 1) < 0.1
    print(json.dumps({"byte_perplexity": {"16 bits": full, "2 bits": two}, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    enter("lm-eval-serve", "lm-eval[api]>=0.4.9", "transformers")
    sys.exit(main())
