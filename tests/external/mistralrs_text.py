#!/usr/bin/env python3
"""A bundle in unmodified mistral.rs: the base's greedy text.

    python3 mistralrs_text.py BASE BUNDLE [BUNDLE ...]

Loads the directories in float32 on the CPU and continues some prompts greedily by 32 tokens each; exits 1 unless every BUNDLE gives BASE's text.
Prints one JSON line. Every model is a process of its own. Installs mistralrs, see environment.py.
"""
import json
import subprocess
import sys

from environment import enter

PROMPTS = ["The sky is blue because", "In the year 1815,", "def fibonacci(n):", "A recipe for bread: take"]
N_NEW = 32


def child(model):
    from mistralrs import CompletionRequest, ModelDType, Runner, Which

    runner = Runner(which=Which.Plain(model_id=model, dtype=ModelDType.F32))
    texts = []
    for prompt in PROMPTS:
        request = CompletionRequest(prompt=prompt, model="default", max_tokens=N_NEW, temperature=0.0, top_k=1)
        texts.append(runner.send_completion_request(request).choices[0].text)
    print("RESULT " + json.dumps(texts), flush=True)


def texts_of(model):
    done = subprocess.run([sys.executable, __file__, model, "--child"], capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        sys.exit(f"{model}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return json.loads(found[0].removeprefix("RESULT "))


def main(base, *bundles):
    expected = texts_of(base)
    same = {bundle: texts_of(bundle) == expected for bundle in bundles}
    ok = all(expected) and bool(same) and all(same.values())
    print(json.dumps({"prompts": len(PROMPTS), "tokens each": N_NEW, "the base's text": same, "first": expected[0], "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    if sys.argv[-1] == "--child":
        child(sys.argv[1])
    else:
        enter("mistralrs", "mistralrs==0.9.5")
        sys.exit(main(*sys.argv[1:]))
