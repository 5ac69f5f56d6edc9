"""Entry point of the `understudy` command: nothing is imported before an interruption would be caught."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from .cli.main import app

        app()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
