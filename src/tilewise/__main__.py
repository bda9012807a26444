"""Run the command line: `python -m tilewise`."""

import sys

from .cli import main

sys.exit(main())
