"""Run a study: python -m studies NAME, from a checkout. The installed package has none."""

import importlib.util
import sys

NEEDED = ("typer", "rich", "matplotlib")


def main() -> int:
    """Run a study, and return its exit status."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"The studies need {' and '.join(missing)}: pip install --editable '.[studies]'", file=sys.stderr)
        return 1
    from . import ablation  # noqa: F401, adds its suite before `bench` lists them
    from .app import app

    app(prog_name="studies")
    return 0


if __name__ == "__main__":
    sys.exit(main())
