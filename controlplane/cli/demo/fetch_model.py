"""Make the demo's model, in a process of its own, so that torch's memory is gone afterwards.

    python -m controlplane.cli.demo.fetch_model smollm2|tiny CACHE_DIR SEED PATH_FILE

Writes the model's directory into PATH_FILE. Ends with 1 and one line on stderr if the model cannot be had.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    name, cache_dir, seed, path_file = sys.argv[1:]
    from trainer_agent.demo.models import ModelUnavailable, smollm2, tiny

    try:
        path = smollm2(cache_dir) if name == "smollm2" else tiny(cache_dir, int(seed))
    except ModelUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    Path(path_file).write_text(str(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
