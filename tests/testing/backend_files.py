"""Text of backend files for tests that run the kit as a command."""

RIGHT = """
from specops.ops import register_backend
from specops.ops.reference import mha

@register_backend("filed", device_types=("cpu",), layouts=("uniform",))
def filed(*args, **options):
    return mha(*args, **options)
"""
WRONG = RIGHT.replace("return mha(", "return 1.01 * mha(")
KILLED = RIGHT.replace("return mha(", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV); return mha(")
