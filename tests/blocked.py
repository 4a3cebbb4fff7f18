"""Packages that are installed, as if they were not."""

import contextlib
import subprocess
import sys
import textwrap

# For a process of its own: every finder looks away, as it would if nothing were there.
BLOCK = """
import sys

class Without:
    def __init__(self, finder, names):
        self.finder, self.names = finder, names

    def find_spec(self, name, *rest):
        if name.partition(".")[0] in self.names:
            return None
        return self.finder.find_spec(name, *rest)

    def __getattr__(self, name):
        return getattr(self.finder, name)

def block(*names):
    for name in list(sys.modules):
        if name.partition(".")[0] in names:
            del sys.modules[name]
    sys.meta_path[:] = [Without(getattr(f, "finder", f) if isinstance(f, Without) else f, names) for f in sys.meta_path]
"""


def run_blocked(names, code, **options):
    """Runs Python code in a process that has not these packages."""
    script = f"{BLOCK}\nblock(*{tuple(names)!r})\n{textwrap.dedent(code)}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, **options)


@contextlib.contextmanager
def blocked(monkeypatch, *names):
    """Within it, importing these packages fails in this process; for what is imported where it is used."""
    with monkeypatch.context() as patch:
        for loaded in list(sys.modules):
            if loaded.partition(".")[0] in names:
                patch.delitem(sys.modules, loaded)
        for name in names:
            patch.setitem(sys.modules, name, None)
        yield
