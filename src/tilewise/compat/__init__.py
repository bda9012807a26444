"""Drop-in interfaces of other packages, as thin layers over tilewise.

Change an import and the code runs; or let `install` answer imports of the other package, and change nothing.
"""

from .shadow import install, uninstall

__all__ = ["install", "uninstall"]
