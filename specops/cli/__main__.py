"""``python -m specops.cli``."""

import sys

from specops.cli import main

sys.exit(main())
