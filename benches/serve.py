#!/usr/bin/env python3
"""Throughput and latency of `wush serve` with 1, 8 and 64 clients, batched and one text at a time.

Every client sends its requests one after another, each a piece of TEXT to be continued greedily by a fixed number of tokens,
and reads the stream. "unbatched" is the same server with --max-running 1: the same runtime, one text at a time. Needs Python's
standard library alone.

    python3 benches/serve.py target/release/wush BUNDLE TEXT [--kv-bits 2] [--clients 1,8,64] [--requests 2] [--tokens 64]
"""

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import threading
import time


class Server:
    """`wush serve` on a free port."""

    def __init__(self, wush, model, options):
        command = [wush, "serve", model, "--port", "0", "--prefixes", "0", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        for line in self.process.stderr:
            if line.startswith("listening  on http://"):
                self.address = line.strip().removeprefix("listening  on http://")
                break
        else:
            raise SystemExit("the server did not start")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait() != 0:
            raise SystemExit("the server did not end well")

    def cpu_seconds(self):
        with open(f"/proc/{self.process.pid}/stat", encoding="ascii") as stat:
            fields = stat.read().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_memory(self):
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def complete(address, prompt, n_tokens):
    """Times of a request: to its first token, and between tokens."""
    body = {"prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True, "stream": True, "logprobs": 0}
    connection = http.client.HTTPConnection(address, timeout=600)
    last = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    times = []
    response = connection.getresponse()
    assert response.status == 200, response.read()
    for line in response:
        if line.startswith(b"data: {") and b'"token_logprobs":[]' not in line:
            now = time.perf_counter()
            times.append(now - last)
            last = now
    connection.close()
    assert len(times) == n_tokens, f"{len(times)} tokens, not {n_tokens}"
    return times[0], times[1:]


def run(server, prompts, n_clients, n_requests, n_tokens):
    """Tokens a second of all clients together, times to the first and to every next token, and the number of answers."""
    first, between, lock = [], [], threading.Lock()

    def client(index):
        for request in range(n_requests):
            prompt = prompts[(index * n_requests + request) % len(prompts)]
            to_first, to_next = complete(server.address, prompt, n_tokens)
            with lock:
                first.append(to_first)
                between.extend(to_next)

    threads = [threading.Thread(target=client, args=(index,)) for index in range(n_clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    assert len(first) == n_clients * n_requests, "a client failed"
    return len(first) * n_tokens / seconds, first, between, len(first)


def percentile(values, q):
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wush")
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--kv-bits", default="2")
    parser.add_argument("--clients", default="1,8,64")
    parser.add_argument("--requests", type=int, default=2, help="requests of each client")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--prompt-bytes", type=int, default=600)
    args = parser.parse_args()
    with open(args.text, encoding="utf-8") as file:
        text = file.read()
    step = args.prompt_bytes
    prompts = [text[at : at + step] for at in range(0, len(text) - step, step)]
    print("| clients | | tokens/s | first token, median, s | 95 % | next token, median, ms | 95 % | CPU a token, ms | peak memory, MB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for n_clients in map(int, args.clients.split(",")):
        for name, options in [("batched", []), ("unbatched", ["--max-running", "1"])]:
            server = Server(args.wush, args.model, ["--kv-bits", args.kv_bits, *options])
            complete(server.address, prompts[-1], 8)
            cpu = server.cpu_seconds()
            rate, first, between, n_answers = run(server, prompts, n_clients, args.requests, args.tokens)
            cpu = (server.cpu_seconds() - cpu) / (n_answers * args.tokens)
            memory = server.peak_memory() / 1e6
            server.stop()
            print(
                f"| {n_clients} | {name} | {rate:.0f} | {statistics.median(first):.2f} | {percentile(first, 0.95):.2f} "
                f"| {statistics.median(between) * 1e3:.1f} | {percentile(between, 0.95) * 1e3:.1f} "
                f"| {cpu * 1e3:.2f} | {memory:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
