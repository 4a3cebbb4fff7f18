"""Root may write anywhere; tests of read-only directories must not be root."""

import contextlib
import os

_NOBODY = 65534


@contextlib.contextmanager
def unprivileged():
    """Gives up root's right to write anywhere for a while; nothing changes for other users."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
