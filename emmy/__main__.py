"""`python -m emmy`: the same as the command `emmy`."""

from __future__ import annotations

import sys

from emmy.cli import main

sys.exit(main())
