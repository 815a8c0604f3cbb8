"""``python -m molt_sdk`` is ``molt-sdk``."""

from molt_sdk.cli import main

main()
