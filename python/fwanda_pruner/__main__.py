"""`python -m fwanda_pruner` is `fwanda`."""

from .cli import main

raise SystemExit(main())
