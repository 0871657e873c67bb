#!/usr/bin/env python3
"""The transforms of `wush solve --preset paper`, with other signs of the eigenvectors: another of the solutions that Eq. 1, or OSCAR, leaves open.

    python3 other_signs.py STATISTICS.safetensors TRANSFORMS.safetensors OUT.safetensors [SEED]

TRANSFORMS are `wush` or, with `--transform oscar-per-head`, OSCAR's. Solves for them in f64 by torch from the statistics that they were solved from. Without SEED
the signs are those that LAPACK gives, with it they are drawn. Exits 1 when what no sign changes is not that of TRANSFORMS: T^T T, or OSCAR's directions. Needs torch and
safetensors.
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


def wush(gram, hessian, damping, signs, known):
    """Eq. 1 with the columns of U times `signs`, and by how much its metric differs from the known one's."""
    lower = torch.linalg.cholesky(damped(hessian, damping))
    values, vectors = torch.linalg.eigh(lower.T @ damped(gram, damping) @ lower)
    c = math.sqrt((1 + damping) * gram.trace() / values.sqrt().sum())
    head = c * hadamard(len(gram)) @ ((values**-0.25)[:, None] * (vectors * signs).T) @ lower.T
    metric = known.T @ known
    return head, torch.linalg.norm(head.T @ head - metric) / torch.linalg.norm(metric)


def oscar(covariance, signs, known):
    """OSCAR's rotation with the columns of U times `signs`, and by how much the known one is not of these directions."""
    order = len(covariance)
    _, vectors = torch.linalg.eigh(covariance)
    bits = order.bit_length() - 1
    reversed_rank = [int(f"{rank:0{bits}b}"[::-1], 2) if bits else 0 for rank in range(order)]
    head = torch.empty_like(covariance)
    head[reversed_rank] = ((vectors * signs) @ hadamard(order)).T.flip(0)
    return head, ((known @ vectors).abs() * math.sqrt(order) - 1).abs().max()


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
    kind = options["transform"]
    if kind not in ("wush", "oscar-per-head") or (options["exponent"], options["factor"]) != (0.25, "hadamard"):
        raise SystemExit("error: transforms wush or oscar-per-head of `wush solve --preset paper`, please")
    random = None if seed is None else torch.Generator().manual_seed(int(seed))
    others, worst = {}, 0.0
    for name, matrices in solved.items():
        layer, role = name.rsplit(".", 1)
        of = {"key": ("query_gram", "query_gram"), "value": ("output_gram", "weighted_value_gram")}[role]
        hessians, covariances = (sums.get(f"{layer}.{which}") for which in of)
        heads = []
        for head, known in enumerate(matrices):
            signs = torch.ones(len(known)) if random is None else torch.randint(0, 2, (len(known),), generator=random) * 2 - 1
            if kind == "wush":
                gram = sums[f"{layer}.{role}_gram"][head]
                other, differs = wush(gram, hessians[head], options["damping"], signs.double(), known)
            else:
                other, differs = oscar(covariances[head], signs.double(), known)
            worst = max(worst, float(differs))
            heads.append(other)
        others[name] = torch.stack(heads).contiguous()
    print(f"but for signs they differ by {worst:.1e} at most")
    save_file(others, out, metadata=metadata | {"content_hash": content_hash(others, metadata)})
    return int(worst > REL_TOL)


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        raise SystemExit(__doc__)
    sys.exit(main(*sys.argv[1:]))
