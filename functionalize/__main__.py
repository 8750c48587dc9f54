"""`python -m functionalize`: the command line."""

from __future__ import annotations

import sys

from functionalize.planner.cli import main

sys.exit(main())
