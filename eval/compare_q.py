"""Compare quantized models by perplexity: ``python eval/compare_q.py -d data.json -m a.json b.json -p``.

Only starts ``eval/cli.py``: engines that spawn worker processes import this file again in each of them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Before torch is imported: threads that spin at barriers lose badly when a core is busy with something else (window of
# 1024 on 2 cores, 1 busy: 2.5 to 9 s spinning, 1.6 s passive; both idle: 0.78 and 0.82 s).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the repository, in place of eval/

if __name__ == "__main__":
    from eval.cli import main

    sys.exit(main())
