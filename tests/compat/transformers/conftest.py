import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
collect_ignore_glob = ["models.py", "sweep.py"]


@pytest.fixture(autouse=True)
def installed():
    """Each test begins with tilewise installed, and afterwards transformers is as it was."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tilewise.compat.transformers import install, uninstall

    transformers.logging.set_verbosity_error()
    install()
    yield
    install()
    uninstall()
