"""append_ and copy_pages_ on a GPU: the tests of tests/test_append.py that run a kernel."""

from test_append import *  # noqa: F403, they run the kernel where there is a GPU

from .sizes import on_gpu

pytestmark = on_gpu
