"""dlrm: trains a recommender (DLRM) with and without compression; see `train_dlrm.py --help`.

Reading order: data (loads rows), models, modes (gradient exchange), traffic (bytes by purpose),
training (a pass over batches), loop (one run), comparison (all runs, and the command), report,
conclusion. Helpers: options, arguments, launch.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # for bench.cost_model
