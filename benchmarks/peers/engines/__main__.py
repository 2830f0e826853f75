"""What runs in a contender's own process: `python .../engines NAME`, one engine behind lines of JSON.

Nothing here imports Outrider but the engine of that name, and nothing but the standard library is needed beside the
engine itself: a peer runs in an environment of its own.
"""

import importlib
import sys

from wire import serve

sys.exit(serve(importlib.import_module(f"{sys.argv[1]}_engine")))
