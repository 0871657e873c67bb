#!/usr/bin/env python3
"""The transforms of `wush solve --preset paper`, with other signs of the eigenvectors: another of the solutions that Eq. 1 leaves open.

    python3 other_signs.py STATISTICS.safetensors TRANSFORMS.safetensors OUT.safetensors [SEED]

Solves Eq. 1 in f64 by torch from the statistics that TRANSFORMS was solved from. Without SEED the signs are those that LAPACK gives, with it they
are drawn. Exits 1 when T^T T, which no sign changes, is not that of TRANSFORMS. Needs torch and safetensors.
"""
import hashlib
import json
import math
import sys

import torch
from safetensors import safe_open
from safetensors.torch import save_file

# Entries of metadata that a reader compares, and the hash itself.
NOT_HASHED = ("format", "version", "content_hash")
# Two f64 solvers over matrices of condition up to 1e5.
REL_TOL = 1e-9


def hadamard(order):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < order:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    if len(matrix) != order:
        raise SystemExit(f"error: a head dimension that is a power of two, found {order}")
    return matrix / math.sqrt(order)


def damped(matrix, damping):
    return matrix + damping * matrix.trace() / len(matrix) * torch.eye(len(matrix), dtype=torch.float64)


def solve(gram, hessian, damping, signs):
    """Eq. 1 with the columns of U times `signs`."""
    lower = torch.linalg.cholesky(damped(hessian, damping))
    values, vectors = torch.linalg.eigh(lower.T @ damped(gram, damping) @ lower)
    c = math.sqrt((1 + damping) * gram.trace() / values.sqrt().sum())
    return c * hadamard(len(gram)) @ ((values**-0.25)[:, None] * (vectors * signs).T) @ lower.T


def read(path):
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()


def content_hash(tensors, metadata):
    """Of a file of transforms, as docs/formats.md has it."""
    entries = [(key, text.encode()) for key, text in sorted(metadata.items()) if key not in NOT_HASHED]
    entries += [(name, tensor.numpy().tobytes()) for name, tensor in sorted(tensors.items())]
    lines = (f"{name}\0{hashlib.sha256(data).hexdigest()}\n" for name, data in entries)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def main(statistics, transforms, out, seed=None):
    sums, _ = read(statistics)
    solved, metadata = read(transforms)
    options = json.loads(metadata["solve"])
    if (options["transform"], options["exponent"], options["factor"]) != ("wush", 0.25, "hadamard"):
        raise SystemExit("error: transforms of `wush solve --preset paper`, please")
    random = None if seed is None else torch.Generator().manual_seed(int(seed))
    others, worst = {}, 0.0
    for name, matrices in solved.items():
        layer, role = name.rsplit(".", 1)
        grams, hessians = sums[f"{layer}.{role}_gram"], sums[f"{layer}.{'query' if role == 'key' else 'output'}_gram"]
        heads = []
        for gram, hessian, known in zip(grams, hessians, matrices):
            signs = torch.ones(len(gram)) if random is None else torch.randint(0, 2, (len(gram),), generator=random) * 2 - 1
            head = solve(gram, hessian, options["damping"], signs.double())
            metric = known.T @ known
            worst = max(worst, float(torch.linalg.norm(head.T @ head - metric) / torch.linalg.norm(metric)))
            heads.append(head)
        others[name] = torch.stack(heads).contiguous()
    print(f"T^T T differs by {worst:.1e} at most")
    save_file(others, out, metadata=metadata | {"content_hash": content_hash(others, metadata)})
    return int(worst > REL_TOL)


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        raise SystemExit(__doc__)
    sys.exit(main(*sys.argv[1:]))
