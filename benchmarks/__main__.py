"""`make bench`: the throughput benchmark; the others are run by name (python -m benchmarks.exactness)."""

import sys

from benchmarks.throughput import main

sys.exit(main())
