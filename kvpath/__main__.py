"""``python -m kvpath`` is the ``kvpath`` command."""

from kvpath.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
