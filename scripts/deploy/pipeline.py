"""A pipeline for checkpoints: relocate a tree, validate it, and publish it with its digests.

    python scripts/deploy/pipeline.py SRC DST

SRC and DST are folders, or URLs such as s3://bucket/runs. The exit code is 0 if all is done and
proved, and 1 if not; then nothing is published. Run it again to go on where it was broken off.
"""

from __future__ import annotations

import argparse
import sys

import ckptmove


def publish(src: str, dst: str) -> int:
    """Run the pipeline; gives the exit code."""
    digests = dict[str, str]()
    with ckptmove.batch("relocate", src, dst, to="cpu", digests=True, verify=True) as relocated:
        for result in relocated:
            digests.update(result.digests)
    with ckptmove.batch("validate", dst, against=src) as validated:
        results = list(validated)
    failures = [*relocated.report().failures, *(each for each in results if not each.ok)]
    for each in failures:
        print(f"{each.outcome} {each.name}: {each.reason}", file=sys.stderr)
    if failures:
        return 1
    for name, digest in sorted(digests.items()):  # sha256sum -c reads it, in DST
        print(f"{digest}  {name}")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("src")
    parser.add_argument("dst")
    given = parser.parse_args()
    try:
        raise SystemExit(publish(given.src, given.dst))
    except ckptmove.CkptmoveError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from error
