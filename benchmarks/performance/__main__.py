"""Write docs/developers/performance.md: ``python -m benchmarks.performance``.

A newer result replaces an older one by its name in ``page.template``.
"""

from __future__ import annotations

import argparse

from benchmarks.performance.page import PAGE, page
from dptrain.files import write_whole


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    write_whole(PAGE, page(), str(PAGE))
    print(f"{PAGE} was written")


if __name__ == "__main__":
    main()
