#!/usr/bin/env python3
"""Whether two statistics files hold the same sums up to their order.

    python3 same_statistics.py ONE.safetensors OTHER.safetensors

Needs nothing but Python. Exits 1 with the worst relative difference when it is above what ten sums in another order can make:
each step rounds by 2^-53 of a sum no larger than the result's largest element.
"""
import json
import struct
import sys

LIMIT = 10 * 2.0**-53


def tensors(path):
    with open(path, "rb") as file:
        data = file.read()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    body = data[8 + size :]
    sums = {}
    for name, entry in header.items():
        if entry["dtype"] == "F64":
            first, end = entry["data_offsets"]
            sums[name] = struct.unpack(f"<{(end - first) // 8}d", body[first:end])
    return sums


def main(one, other):
    one, other = tensors(one), tensors(other)
    if not one or one.keys() != other.keys():
        print("error: other tensors", file=sys.stderr)
        return 1
    worst = 0.0
    for name, sums in one.items():
        largest = max(map(abs, sums))
        difference = max(abs(a - b) for a, b in zip(sums, other[name]))
        worst = max(worst, difference / largest if largest else difference)
    print(f"{len(one)} tensors, worst relative difference {worst:.1e}, at most {LIMIT:.1e} allowed")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
