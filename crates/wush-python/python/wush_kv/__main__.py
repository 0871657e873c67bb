"""`python -m wush_kv BUNDLE`: checks a bundle, every file of it, and says what it is. Exits with 2 where it is none."""

import argparse
import sys

from wush_kv import Bundle, WushError


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m wush_kv", description="Check a bundle and say what it is.")
    parser.add_argument("bundle")
    try:
        bundle = Bundle.open(parser.parse_args().bundle)
    except WushError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(bundle.describe())
    return 0


if __name__ == "__main__":
    sys.exit(main())
