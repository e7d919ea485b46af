"""``python -m kvass`` is ``kvass``."""

from kvass.cli.main import main

raise SystemExit(main())
